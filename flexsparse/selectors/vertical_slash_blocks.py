"""Vertical-slash blocks: the columns and diagonals that the last queries attend to most.

Source: Jiang et al., "MInference 1.0", 2024, 3 (vertical-slash pattern) and Algorithm 2,
https://arxiv.org/abs/2407.02490; the columns and diagonals that are always kept, and the default
budgets, are those of the published code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexsparse.errors import check_number, check_per_head
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing
from flexsparse.selectors.covering import highest, in_reach, listed, per_head, row_ends, shared
from flexsparse.selectors.last_queries import by_distance, last_queries

if TYPE_CHECKING:
    from flexsparse.masks.vertical_slash import VerticalSlash


@dataclass(frozen=True, eq=False, kw_only=True)
class VerticalSlashBlocks(Selector):
    """Blocks that hold a chosen column or diagonal of a query head.

    No block of the future; inside a row's own block causality is the rule's.

    The exact softmax of the last ``sample`` queries is summed over columns and over diagonals. Kept
    are the ``vertical`` highest columns, the ``first`` ones before all others, and the ``slash``
    highest distances from query back to key, the ``near`` ones before all others; a budget below
    these is raised to them (the published code raises to 30 and 50). ``vertical`` and ``slash`` are
    numbers, or int ``[Hq]``. Distances run from 0 to ``kv_len - 1``.

    With ``block=1, q_block=1`` the candidates are exactly the pattern's keys. Larger blocks are what
    a tile kernel reads: every block in which some query of the row has such a key. `exact` is the
    rule that cuts them down to the pattern. Takes ``sample`` times S for each head.
    """

    keep: int = field(init=False, repr=False, default=1)
    vertical: int | Tensor = 1000
    slash: int | Tensor = 6096
    sample: int = 64
    first: int = 30
    near: int = 100
    heads: Heads = "query"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("VerticalSlashBlocks", self.heads)
        check_per_head("VerticalSlashBlocks", "vertical", self.vertical, int, 0)
        check_per_head("VerticalSlashBlocks", "slash", self.slash, int, 0)
        check_number("VerticalSlashBlocks", "sample", self.sample, int, 1)
        check_number("VerticalSlashBlocks", "first", self.first, int, 0)
        check_number("VerticalSlashBlocks", "near", self.near, int, 0)

    @torch.no_grad()
    def found(
        self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None
    ) -> tuple[Tensor, Tensor]:
        """bool ``[B, Hq, S]`` each: the columns, and the distances."""
        sample = last_queries(q, k, grid, rule, self.sample, self.scale)
        chosen = []
        for name, mass, always in (
            ("vertical", sample.weights.sum(2), self.first),
            ("slash", by_distance(sample), self.near),
        ):
            count = per_head(getattr(self, name), q, "VerticalSlashBlocks", name)
            if isinstance(count, Tensor):
                count = count.squeeze(-1) if count.ndim else count
                count = count.clamp(min=always)
            else:
                count = max(int(count), always)
            mass[..., :always] = torch.inf
            chosen.append(highest(mass, count))
        return chosen[0], chosen[1]

    def exact(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> VerticalSlash:
        """The rule of exactly the pattern's pairs, for queries that stand among the keys."""
        from flexsparse.masks.vertical_slash import VerticalSlash

        return VerticalSlash(*self.found(q, k, grid, rule))

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        columns, distances = self.found(q, k, grid, rule)
        chosen = blocks_of(columns, distances, grid, self.q_block, self.block)
        chosen = chosen & in_reach(q, k, grid, rule, (self.q_block, self.block))
        return shared(listed(chosen, grid, self.q_block, self.block), k.shape[1], self.heads)


def blocks_of(columns: Tensor, distances: Tensor, grid: Grid, q_block: int, block: int) -> Tensor:
    """bool ``[B, H, R, C]``: blocks with a pair in a column or at a distance of ``[B, H, S]``.

    >>> none, two = torch.zeros(1, 1, 6, dtype=torch.bool), torch.arange(6)[None, None] == 2
    >>> blocks_of(none, two, Grid(6, 6), 2, 2).int()[0, 0]
    tensor([[0, 0, 0],
            [1, 0, 0],
            [0, 1, 0]], dtype=torch.int32)
    """
    start, end = (x[..., None] for x in row_ends(grid, q_block, columns.device))
    _, blocks = grid.shape(1, block)
    first = torch.arange(blocks, device=columns.device) * block
    last = (first + block).clamp(max=grid.kv_len) - 1
    # All distances between the two corners of a block occur in it.
    return _any_between(columns, first, torch.minimum(last, end)) | _any_between(
        distances, (start - last).clamp(min=0), (end - first).clamp(max=grid.kv_len - 1)
    )


def _any_between(marked: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """bool ``[B, H, R, C]``: whether ``marked [B, H, S]`` has an entry in ``low`` to ``high``, both in."""
    before = pad(marked.cumsum(-1), (1, 0))
    low, high = torch.broadcast_tensors(low, high + 1)
    size = before.shape[-1] - 1

    def count(index: Tensor) -> Tensor:
        index = index.clamp(0, size).flatten(1)[:, None]
        return before.gather(-1, index.expand(*before.shape[:2], -1))

    there: Tensor = (count(high) > count(low)).unflatten(-1, low.shape[1:])
    return there
