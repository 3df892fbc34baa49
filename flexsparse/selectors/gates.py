"""A choice as gates, so that a loss on what is chosen reaches the scores it was chosen by.

Source of the straight-through estimator: Bengio et al., "Estimating or Propagating Gradients Through
Stochastic Neurons for Conditional Computation", 2013, 4, https://arxiv.org/abs/1308.3432.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_gates(score: Tensor, keep: int, temperature: float = 1.0) -> Tensor:
    """``score [..., C]``, -inf where nothing may be chosen -> gates in [0, 1] of the same shape.

    ``sigmoid((score - border) / temperature)``; the border lies halfway between the ``keep``-th and
    the next score of its row, so that about ``keep`` gates are open. Where no more than ``keep`` may
    be chosen, all of them are open. No gradient passes through the border.

    >>> soft_gates(torch.tensor([3.0, 2.0, 0.0, -torch.inf]), 2)
    tensor([0.8808, 0.7311, 0.2689, 0.0000])
    """
    possible = score > -torch.inf
    if keep >= score.shape[-1]:
        return possible.to(score.dtype) + _touched(score)
    best = score.detach().topk(keep + 1, dim=-1).values
    scarce = best[..., keep:] == -torch.inf
    border = torch.where(scarce, 0.0, best[..., keep - 1 : keep] + best[..., keep:]) / 2
    gate = torch.sigmoid((score.masked_fill(~possible, 0.0) - border) / temperature)
    return torch.where(scarce, torch.ones_like(gate), gate).masked_fill(~possible, 0.0)


def hard_gates(score: Tensor, keep: int) -> Tensor:
    """``score [..., C]`` -> bool: the ``keep`` best above -inf, equal ones by the lower index.

    >>> hard_gates(torch.tensor([1.0, 2.0, 1.0, -torch.inf]), 2).tolist()
    [True, True, False, False]
    """
    order = score.detach().sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(score, dtype=torch.bool)
    chosen.scatter_(-1, order[..., :keep], torch.ones_like(order[..., :keep], dtype=torch.bool))
    return chosen & (score > -torch.inf)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of ``hard`` with the gradient of ``soft``.

    >>> score = torch.tensor([2.0, 0.0], requires_grad=True)
    >>> straight_through(hard_gates(score, 1), soft_gates(score, 1))
    tensor([1., 0.], grad_fn=<AddBackward0>)
    """
    return soft + (hard.to(soft.dtype) - soft).detach()


def _touched(score: Tensor) -> Tensor:
    """Zeros with a gradient of zero, so that a loss of open gates alone can still be differentiated."""
    return score.masked_fill(score == -torch.inf, 0.0) * 0.0
