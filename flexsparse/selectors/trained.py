"""What selectors with weights have in common: a module that selects, and learns from attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.selectors.gates import hard_gates, soft_gates, straight_through
from flexsparse.selectors.tile_budget import TileBudget

if TYPE_CHECKING:
    from flexsparse.selectors.base import Selector


class Trained(nn.Module):
    """Stands before `Selector` among the bases of a selector with weights.

    Its numbers are those of a frozen selector; its weights train like any module's.
    """

    def __init__(self, **numbers: object) -> None:
        super().__init__()
        for name, value in numbers.items():
            object.__setattr__(self, name, value)

    def extra_repr(self) -> str:
        names = ("block", "keep", "q_block")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def check_layer(name: str, heads: tuple[int, int], head_dim: int, q: Tensor, k: Tensor) -> None:
    """Refuses q and k of another layer than the weights were made for."""
    given = (q.shape[1], k.shape[1]), q.shape[3]
    if given != (heads, head_dim):
        raise ShapeError(
            f"{name} was made for heads={heads}, head_dim={head_dim}, but q and k have "
            f"heads={given[0]}, head_dim={given[1]}"
        )


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """``KL(target || softmax(logits))`` of each row, ``[...]``; 0 where the target has no mass.

    ``target [..., C]`` is at least 0 and is scaled to sum to 1; ``logits`` are -inf where nothing may be
    chosen, and there the target does not count.
    """
    possible = logits > -torch.inf
    target = target.masked_fill(~possible, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
    # A row of -inf alone would be NaN, and so would its gradient.
    seen = possible.any(-1, keepdim=True)
    log = torch.where(possible, logits, -torch.inf).masked_fill(~seen, 0.0).log_softmax(-1)
    log = log.masked_fill(~possible, 0.0)
    return (torch.xlogy(target, target) - target * log).sum(-1)


def charged(
    selector: Selector, score: Tensor, budget: TileBudget, temperature: float = 1.0
) -> Tensor:
    """What ``budget`` says of the ``keep`` best of ``score [B, H, R, C]``, -inf where hidden.

    The value is that of the tiles really touched; the gradient that of soft gates.
    """
    blocks, keep = (selector.q_block, selector.block), selector.keep
    if not isinstance(keep, int):
        raise ArgumentError(
            f"a tile budget charges for a number of blocks, got keep {keep!r}: train with an int"
        )
    hard = budget(hard_gates(score, keep).to(score.dtype), *blocks)
    return straight_through(hard, budget(soft_gates(score, keep, temperature), *blocks))
