"""MoBA: read one's own block of keys, and those whose mean key suits the query best.

Source: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025, 2.2,
https://arxiv.org/abs/2502.13189; the set is that of the authors' plain implementation. The gate is
that of single queries and single heads; a row of queries, and heads that share a list, take their
highest gate here.

>>> q = k = torch.eye(4).repeat_interleave(2, 0)[None, None]
>>> MoBA(block=2, keep=2).select(q, k, Grid(8, 8)).indices[0, 0, -1].tolist()
[0, 3]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.selectors.base import Heads, Selector, check_sharing, pooled
from flexsparse.selectors.physical import Keep
from flexsparse.selectors.pooled import highest
from flexsparse.selectors.visible import begun, exactly, nearest


@dataclass(frozen=True, eq=False, kw_only=True)
class MoBA(Selector):
    """Ranks blocks by ``q`` times their mean key, in at least fp32; the own block is always kept.

    ``block``: 512 to 4096 in the paper; ``keep``: its top-k, the own block counted, 3 to 12. Blocks of
    the future are hidden whatever the rule; inside the own block causality is the rule's. Equal gates
    go to the lower index. ``heads``: who shares a list, in the paper nobody.
    """

    block: int = 512
    keep: Keep = 3
    q_block: int = 1
    heads: Heads = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("MoBA", self.heads)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        mean = block_means(exactly(k), self.block)
        gate = highest(q, mean, None, q_block=self.q_block, heads=self.heads, scale=1.0)
        return gate.masked_fill_(~begun(grid, self.q_block, self.block, q.device), -torch.inf)

    def forced(self, grid: Grid, device: torch.device) -> Tensor:
        return nearest(grid, self.q_block, self.block, device)


def block_means(x: Tensor, block: int) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, C, D]``; the last block by the keys that it has."""
    total = pooled(x, block, 0.0).sum(3)
    start = torch.arange(total.shape[2], device=x.device) * min(block, x.shape[2])
    return total / (x.shape[2] - start).clamp(max=block)[:, None]
