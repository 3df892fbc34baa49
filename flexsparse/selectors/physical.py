"""A budget of what the kernel reads: how many key tiles the rows of a query tile touch together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from torch import Tensor

from flexsparse.errors import ArgumentError, SelectionError
from flexsparse.selection import Selection
from flexsparse.selectors.budgets import Each, as_budgets


@dataclass(frozen=True)
class Tiles:
    """Rows that share a tile of ``q_tile`` queries touch at most ``most`` tiles of ``kv_tile`` keys.

    Blocks are taken in the order of their scores over all rows of the tile, each row up to its own
    budget ``each`` (a count, fraction or `Mass`, or one of these a head); the first ``most`` tiles that they touch are open, and each row keeps the best blocks of
    open tiles instead of what it would have kept elsewhere. ``contiguity`` is added to the score of a
    tile for each of its two neighbours that some row wants too. A row that would be left with nothing
    keeps its best block, and its tile is touched beyond ``most``.

    ``q_tile`` is a multiple of the selector's ``q_block``, ``kv_tile`` one of its ``block``. Each list
    of heads is a tile of its own.
    """

    q_tile: int
    kv_tile: int
    most: int
    each: Each = 16
    contiguity: float = 0.0

    def __post_init__(self) -> None:
        for name in ("q_tile", "kv_tile", "most"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ArgumentError(f"Tiles {name} must be an int of at least 1, got {value!r}")
        as_budgets("Tiles", self.each)
        bonus = self.contiguity
        if isinstance(bonus, bool) or not isinstance(bonus, int | float) or not bonus >= 0:
            raise ArgumentError(f"Tiles contiguity must be a number of at least 0, got {bonus!r}")

    def check(self, owner: str, q_block: int, block: int) -> None:
        for name, tile, part, of in (
            ("q_tile", self.q_tile, q_block, "q_block"),
            ("kv_tile", self.kv_tile, block, "block"),
        ):
            if tile % part:
                raise ArgumentError(
                    f"{owner} keep.{name} must be a multiple of {of} {part}, got {tile}"
                )

    def open(self, rank: Tensor, kept: Tensor, q_block: int, block: int) -> Tensor:
        """bool ``[B, H, R, C]``: the blocks of open tiles.

        ``rank``: the scores, -inf out of reach; ``kept``: what each row keeps without this budget.
        """
        rows, columns = self.q_tile // q_block, self.kv_tile // block
        wanted = rank.masked_fill(~kept, -torch.inf)
        value = _most(_most(wanted, rows, -2), columns, -1)
        here = value > -torch.inf
        near = torch.nn.functional.pad(here.to(value.dtype), (1, 1))
        value = value + self.contiguity * (near[..., :-2] + near[..., 2:])
        first = value.sort(dim=-1, descending=True, stable=True).indices[..., : self.most]
        opened = torch.zeros_like(here).scatter_(-1, first, True) & here
        spread = repeat(opened, "b h r c -> b h (r m) (c n)", m=rows, n=columns)
        spread = spread[..., : rank.shape[-2], : rank.shape[-1]]
        nothing = ~((rank > -torch.inf) & spread).any(-1, keepdim=True)
        best = rank.argsort(dim=-1, descending=True, stable=True)[..., :1]
        return spread | torch.zeros_like(kept).scatter_(-1, best, nothing)


Keep = Each | Tensor | Tiles


def recall(chosen: Selection, wanted: Selection) -> Tensor:
    """``[B, H, R]``: how much of each row of ``wanted`` is in ``chosen`` too; 1 where it wants nothing.

    >>> a, b = (
    ...     Selection.from_indices(torch.tensor([[[row]]]), kv_len=8, q_len=1)
    ...     for row in ([0, 1, 2, 3], [2, 3, 4, 5])
    ... )
    >>> recall(a, b).item()
    0.5
    """
    if not isinstance(chosen, Selection) or not isinstance(wanted, Selection):
        raise SelectionError("recall compares two Selections")
    both = chosen & wanted
    if both.rows != wanted.rows or both.kv_block != wanted.kv_block:
        raise SelectionError(
            f"recall compares Selections of the same blocks, got ({chosen.q_block}, {chosen.kv_block}) "
            f"and ({wanted.q_block}, {wanted.kv_block})"
        )
    return both.counts / wanted.counts.clamp(min=1) + (wanted.counts == 0)


def _most(x: Tensor, size: int, axis: int) -> Tensor:
    """The highest of every ``size`` neighbours along one of the last two axes."""
    missing = -x.shape[axis] % size
    x = torch.nn.functional.pad(
        x, (0, missing) if axis == -1 else (0, 0, 0, missing), value=-torch.inf
    )
    highest: Tensor = x.unflatten(axis, (-1, size)).amax(axis)
    return highest
