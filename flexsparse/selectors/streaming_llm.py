"""StreamingLLM: read the first keys, which everybody attends to, and the latest.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023, 3.2,
https://arxiv.org/abs/2309.17453. The paper numbers positions anew inside its cache; here they stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexsparse.errors import check_number
from flexsparse.grid import Grid
from flexsparse.selectors.base import Selector
from flexsparse.selectors.caches import Cache
from flexsparse.selectors.physical import Keep
from flexsparse.shapes import ceil_div


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamingLLM(Selector):
    """The blocks that hold one of the first ``sinks`` keys, or one of a query's last ``window``.

    A query's own key is among its window. With ``block=1, q_block=1`` these are the paper's keys
    exactly; larger blocks add the rest of each. ``keep`` follows from them. It never looks at keys.
    """

    sinks: int = 4
    window: int = 512
    keep: Keep = field(init=False, default=1)

    def __post_init__(self) -> None:
        check_number("StreamingLLM", "sinks", self.sinks, int, 0)
        check_number("StreamingLLM", "window", self.window, int, 1)
        super().__post_init__()
        # The windows of a row lie side by side, anywhere among the blocks.
        latest = ceil_div(self.window + self.q_block - 2, self.block) + 1
        object.__setattr__(self, "keep", ceil_div(self.sinks, self.block) + latest)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        rows, blocks = grid.shape(self.q_block, self.block)
        start = torch.arange(rows, device=q.device) * self.q_block
        position = grid.positions(q.device)
        first = position[:, start, None]
        last = position[:, (start + self.q_block).clamp(max=grid.q_len) - 1, None]
        key = torch.arange(blocks, device=q.device) * self.block
        near = key + self.block > first - self.window + 1
        kept = (key <= last) & ((key < self.sinks) | near)
        never = torch.full_like(kept, -torch.inf, dtype=torch.float32)
        return never.masked_fill(kept, 0.0)[:, None]

    def cache(self, k: Tensor, capacity: int | None = None) -> Cache:
        return Cache(self, k, capacity)
