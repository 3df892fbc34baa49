"""MSA: read, for each group of heads, the blocks that hold the highest index score.

Source: Lai et al., "MiniMax Sparse Attention", 2026, the index branch, https://arxiv.org/abs/2606.13392: one index
query a group of heads, one index key for all of them, no ReLU, blocks by their largest score.

>>> k = torch.tensor([0.0, 1, 5, 0, 2, 2, 0, 0]).view(1, 1, 8, 1)
>>> MSA(block=2, keep=2).select(torch.ones_like(k), k, Grid(8, 8)).indices[0, 0, -1].tolist()
[1, 3]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor

from flexsparse.errors import ArgumentError, ShapeError, check_number, check_table
from flexsparse.grid import Grid
from flexsparse.selectors.base import Selector, pooled
from flexsparse.selectors.physical import Keep
from flexsparse.selectors.visible import begun, by_rows, exactly, nearest


@dataclass(frozen=True, eq=False, kw_only=True)
class MSA(Selector):
    """Ranks blocks by the largest product of an index query and an index key; one list a KV head.

    ``query [Hkv, G * D, E]`` makes the index query of a group from its G query heads side by side,
    ``key [Hkv * D, E]`` the index key of a token from its KV heads side by side; in the paper both are
    learned maps of the layer's input. Without them a group's mean query meets its own keys.
    ``keep`` counts the forced blocks: the ``first`` of the sequence (0 as published) and, of each query,
    the ``local`` last, its own among them. Blocks of the future are hidden whatever the rule. A row of
    several queries takes their highest score.
    """

    block: int = 128
    keep: Keep = 16
    q_block: int = 1
    query: Tensor | None = None
    key: Tensor | None = None
    first: int = 0
    local: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("MSA", "first", self.first, int, 0)
        check_number("MSA", "local", self.local, int, 1)
        if (self.query is None) != (self.key is None):
            raise ArgumentError("MSA query and key map into one space: give both, or neither")
        if self.query is not None and self.key is not None:
            check_table("MSA", "query", self.query, "float", "[Hkv, G * D, E]")
            check_table("MSA", "key", self.key, "float", "[Hkv * D, E]")

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        asked, keys = self._indexed(exactly(q), exactly(k))

        def part(queries: Tensor, here: slice) -> Tensor:
            scores = pooled((queries @ keys.mT).mT, self.block, -torch.inf).amax(3).mT
            return pooled(scores, self.q_block, -torch.inf).amax(3)

        worth = by_rows(asked, self.q_block, k.shape[2], part)
        return worth.masked_fill(~begun(grid, self.q_block, self.block, q.device), -torch.inf)

    def forced(self, grid: Grid, device: torch.device) -> Tensor:
        return nearest(grid, self.q_block, self.block, device, first=self.first, local=self.local)

    def _indexed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries ``[B, Hkv, Q, E]`` and index keys ``[B, Hkv or 1, S, E]``."""
        groups = k.shape[1]
        if self.query is None or self.key is None:
            return reduce(q, "b (g r) n d -> b g n d", "mean", g=groups), k
        beside = rearrange(q, "b (g r) n d -> b g n (r d)", g=groups)
        joined = rearrange(k, "b g s d -> b 1 s (g d)")
        for name, table, shape in (
            ("query", self.query, (groups, beside.shape[-1], self.key.shape[1])),
            ("key", self.key, (joined.shape[-1], self.query.shape[2])),
        ):
            if tuple(table.shape) != shape:
                raise ShapeError(
                    f"MSA {name} must be {list(shape)} for q {list(q.shape)} and k {list(k.shape)}, "
                    f"got {list(table.shape)}"
                )
        return beside @ self.query.to(beside), joined @ self.key.to(joined)
