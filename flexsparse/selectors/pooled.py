"""Selectors that look at summaries of blocks: the lowest, highest or mean key of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.selectors.base import Heads, Selector, check_sharing, per_list, pooled
from flexsparse.selectors.caches import PageCache, Pool


@dataclass(frozen=True, eq=False, kw_only=True)
class Pooled(Selector, ABC):
    """Write ``pools``, which summaries are wanted, and ``bound(q, *summaries) -> [B, Hq, Q, C]``.

    A row takes the highest of its queries, a list that of the heads that share it. Decoding keeps
    the summaries alone, not the keys.
    """

    pools: ClassVar[tuple[Pool, ...]]
    heads: Heads = "kv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing(type(self).__name__, self.heads)

    @abstractmethod
    def bound(self, q: Tensor, *summaries: Tensor) -> Tensor:
        """How much each block is worth to each query, ``[B, Hq, Q, C]``.

        ``q [B, Hq, Q, D]`` and each summary ``[B, Hq, C, D]`` are float32.
        """

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.rate(q, *(summary(k, self.block, pool) for pool in self.pools))

    def rate(self, q: Tensor, *summaries: Tensor) -> Tensor:
        """The scores of blocks by their summaries ``[B, Hkv, C, D]``."""
        kv_heads = summaries[0].shape[1]
        each = (x.repeat_interleave(q.shape[1] // kv_heads, 1) for x in summaries)
        bound = self.bound(q.float(), *each)
        bound = pooled(bound, self.q_block, -torch.inf).amax(3)
        return per_list(bound, kv_heads, self.heads, "max")

    def cache(self, k: Tensor, capacity: int | None = None) -> PageCache:
        return PageCache(self, k, capacity)


def summary(k: Tensor, block: int, pool: Pool) -> Tensor:
    """``[B, Hkv, S, D]`` -> float32 ``[B, Hkv, C, D]``: the lowest, highest or mean key of each block."""
    if pool == "amin":
        return pooled(k.float(), block, torch.inf).amin(3)
    if pool == "amax":
        return pooled(k.float(), block, -torch.inf).amax(3)
    total = pooled(k, block, 0.0).sum(3, dtype=torch.float64)
    start = torch.arange(total.shape[2], device=k.device) * block
    filled = (k.shape[2] - start).clamp(max=block)[:, None]
    return (total / filled).float()
