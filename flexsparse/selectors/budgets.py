"""How much a row keeps: a count of blocks, a fraction of those within reach, or a share of the mass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, SelectionError


@dataclass(frozen=True)
class Mass:
    """The fewest of a row's best blocks that hold at least ``share`` of its mass (top-p).

    The mass of a block is what a softmax over the row's scores gives it, ``exp(score)`` beside the
    others', unless the selector's scores are attention mass themselves (``scores_are_mass``). Scores that
    are bounds or similarities, such as Quest's, have no such mass of their own: the share then is one
    of that softmax, not of attention, and a rescaled score keeps another number of blocks.

    ``share`` lies between 0 and 1. A row keeps no fewer than ``least`` blocks, as far as there are
    some within reach, and no more than ``most``, which is also the width of the lists (None: all
    blocks).

    Source: Lin et al., "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning", 2025,
    4.1, https://arxiv.org/abs/2502.02770.

    >>> mass = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    >>> [Mass(share).counts(mass).item() for share in (0.4, 0.6, 0.9)]
    [1, 2, 3]
    """

    share: float
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        share, most = self.share, self.most
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise ArgumentError(f"Mass share must be a number between 0 and 1, got {share!r}")
        for name, value in (("least", self.least), ("most", most)):
            if value is not None and (type(value) is not int or value < 1):
                raise ArgumentError(f"Mass {name} must be an int of at least 1, got {value!r}")
        if most is not None and most < self.least:
            raise ArgumentError(f"Mass most must be at least its least {self.least}, got {most}")

    def counts(self, mass: Tensor) -> Tensor:
        """``mass [..., C]`` float64, in the order in which blocks are kept -> ``[...]``."""
        upto = mass.cumsum(-1)
        # The block that crosses the line is kept.
        count = (upto - mass < self.share * upto[..., -1:]).sum(-1)
        return count.clamp(self.least, self.most)


Budget = int | float | Mass
Each = Budget | tuple[Budget, ...]


def as_budgets(owner: str, keep: Each | Tensor) -> tuple[Budget, ...]:
    """One budget for all lists, or one a head; a tensor is read on the host."""
    if isinstance(keep, Tensor):
        if keep.ndim != 1 or keep.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise ArgumentError(
                f"{owner} keep must be an int or float tensor [H], got {keep.dtype}{list(keep.shape)}"
            )
        keep = tuple(keep.tolist())
    each = keep if isinstance(keep, tuple) else (keep,)
    for one in each:
        whole = type(one) is int and one >= 1
        if isinstance(one, list):
            raise ArgumentError(
                f"{owner} keep has one budget a head as a tuple, got a list: write keep={tuple(one)!r}"
            )
        if not (whole or (isinstance(one, float) and 0 < one < 1) or isinstance(one, Mass)):
            raise ArgumentError(
                f"{owner} keep must be an int of at least 1, a fraction between 0 and 1, a Mass, or "
                f"one of these for each head, got {one!r}"
            )
    if not each:
        raise ArgumentError(f"{owner} keep needs a budget for each head, got none")
    return each


def alike(budgets: tuple[Budget, ...], heads: int) -> bool:
    """Whether every row keeps the same count of blocks, as far as it has them."""
    whole = all(isinstance(one, int) for one in budgets)
    return whole and len(budgets) in (1, heads) and len(set(budgets)) == 1


def width(budgets: tuple[Budget, ...], blocks: int) -> int:
    """The most that any row can keep: known without looking at the device."""
    most = [
        one.most or blocks
        if isinstance(one, Mass)
        else math.ceil(one * blocks)
        if isinstance(one, float)
        else one
        for one in budgets
    ]
    return max(1, min(blocks, max(most)))


def counts(
    owner: str, budgets: tuple[Budget, ...], mass: Tensor, forced: Tensor | None, within: Tensor
) -> Tensor:
    """``[B, H, R]``: how many blocks each row keeps.

    ``mass`` and ``forced`` are ``[B, H, R, C]`` in the order in which blocks are kept, ``within
    [B, H, R]`` is how many of them there are to keep.
    """
    heads = within.shape[1]
    if len(budgets) not in (1, heads):
        raise SelectionError(
            f"{owner} keep has {len(budgets)} budgets, one a head, but selects for {heads} heads: give "
            "one for each, or one for all"
        )
    if len(budgets) == 1:
        return _counted(budgets[0], mass, forced, within)
    parts = [
        _counted(
            one,
            mass[:, h : h + 1],
            None if forced is None else forced[:, h : h + 1],
            within[:, h : h + 1],
        )
        for h, one in enumerate(budgets)
    ]
    return torch.cat(parts, 1)


def _counted(budget: Budget, mass: Tensor, forced: Tensor | None, within: Tensor) -> Tensor:
    if isinstance(budget, Mass):
        count = budget.counts(mass)
        if forced is not None:
            count = count.maximum(forced.sum(-1))
        if budget.most is not None:
            count = count.clamp(max=budget.most)
    elif isinstance(budget, float):
        count = (within.double() * budget).ceil().long()
    else:
        count = torch.full_like(within, budget)
    return count.minimum(within)
