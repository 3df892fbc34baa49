"""Selectors that look at summaries of blocks: the lowest, highest or mean key of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.kernels.row_peaks import row_peaks
from flexsparse.selectors.base import Heads, Selector, check_sharing, pooled, sharing
from flexsparse.selectors.caches import PageCache, Pool


@dataclass(frozen=True, eq=False, kw_only=True)
class Pooled(Selector, ABC):
    """Write ``pools``, which summaries are wanted, and ``rate(q, *summaries) -> [B, H, R, C]``.

    `highest` rates a row by the highest of its queries, and a list by that of the heads that share it.
    Decoding keeps the summaries alone, not the keys.
    """

    pools: ClassVar[tuple[Pool, ...]]
    heads: Heads = "kv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing(type(self).__name__, self.heads)

    @abstractmethod
    def rate(self, q: Tensor, *summaries: Tensor) -> Tensor:
        """``[B, H, R, C]``: how much each block is worth to each row, by summaries ``[B, Hkv, C, D]``."""

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.rate(q, *(summary(k, self.block, pool) for pool in self.pools))

    def cache(self, k: Tensor, capacity: int | None = None) -> PageCache:
        return PageCache(self, k, capacity)


def highest(
    q: Tensor, low: Tensor, high: Tensor | None, *, q_block: int, heads: Heads, scale: float
) -> Tensor:
    """`row_peaks` for lists that are shared by all, one a KV head, or one a query head."""
    return row_peaks(q, low, high, q_block, sharing(q, low, heads), scale)


def summary(k: Tensor, block: int, pool: Pool) -> Tensor:
    """``[B, Hkv, S, D]`` -> ``[B, Hkv, C, D]``: the lowest or highest key of each block; float32: the mean."""
    if pool == "amin":
        return pooled(k, block, torch.inf).amin(3)
    if pool == "amax":
        return pooled(k, block, -torch.inf).amax(3)
    total = pooled(k, block, 0.0).sum(3, dtype=torch.float64)
    start = torch.arange(total.shape[2], device=k.device) * block
    filled = (k.shape[2] - start).clamp(max=block)[:, None]
    return (total / filled).float()
