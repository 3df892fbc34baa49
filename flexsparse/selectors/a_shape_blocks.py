"""A-shape blocks: the first keys and the nearest ones, as candidates.

Source: Jiang et al., "MInference 1.0", 2024, 3 (A-shape pattern), https://arxiv.org/abs/2407.02490;
found by Xiao et al., "StreamingLLM", 2023, https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsparse.errors import check_per_head
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing
from flexsparse.selectors.covering import in_reach, listed, per_head, row_ends, shared

if TYPE_CHECKING:
    from flexsparse.masks.a_shape import AShape


@dataclass(frozen=True, eq=False, kw_only=True)
class AShapeBlocks(Selector):
    """Blocks in which some query sees one of the first ``sink`` keys, or of its last ``window``.

    No block of the future; inside a row's own block causality is the rule's. The query's own key
    counts to the window. Both are numbers of keys, or int
    ``[Hq]``; the defaults are the published ones. With ``block=1, q_block=1`` the candidates are the
    pattern's keys exactly; larger blocks hold more than the pattern, and `exact` is the rule that
    cuts them down to it.

    >>> chosen = AShapeBlocks(sink=1, window=2, block=1, q_block=1).select(
    ...     torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), Grid(4, 4)
    ... )
    >>> chosen.dense().int()[0, 0]
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """

    keep: int = field(init=False, repr=False, default=1)
    sink: int | Tensor = 128
    window: int | Tensor = 3968
    heads: Heads = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("AShapeBlocks", self.heads)
        check_per_head("AShapeBlocks", "sink", self.sink, int, 0)
        check_per_head("AShapeBlocks", "window", self.window, int, 1)

    def exact(self) -> AShape:
        """The rule of exactly the pattern's pairs."""
        from flexsparse.masks.a_shape import AShape

        return AShape(self.sink, self.window)

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        start, end = (x[:, None, :, None] for x in row_ends(grid, self.q_block, q.device))
        _, blocks = grid.shape(1, self.block)
        first = torch.arange(blocks, device=q.device) * self.block
        last = (first + self.block).clamp(max=grid.kv_len) - 1
        sink = per_head(self.sink, q, "AShapeBlocks", "sink")
        window = per_head(self.window, q, "AShapeBlocks", "window")
        # The nearest pair of a block is that of its last key and the row's first query.
        nearest = (start - last).clamp(min=0)
        chosen = (first <= end) & ((first < sink) | (nearest < window))
        chosen = chosen & in_reach(q, k, grid, rule, (self.q_block, self.block))
        chosen = chosen.expand(-1, q.shape[1], -1, -1)
        return shared(listed(chosen, grid, self.q_block, self.block), k.shape[1], self.heads)
