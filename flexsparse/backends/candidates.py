"""The keys that each query may read, as lists: candidates, rule and fallback met before any key is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.program import MaskProgram, offset_of


class Candidates(NamedTuple):
    """What is needed to list the visible keys of any queries, in logical axes.

    ``indices [B or 1, H, R, K]`` are a selection's; ``rule`` is the rule alone, over ``tables``.
    ``reach`` is the fallback's, 0 for none.
    """

    indices: Tensor
    q_block: int
    kv_block: int
    reach: int
    rule: MaskProgram
    tables: Sequence[Tensor]
    batch: int
    heads: int
    kv_heads: int
    kv_len: int

    @property
    def lists(self) -> int:
        """How many heads need lists of their own: KV heads, unless query heads of a group differ."""
        own = self.rule.uses_head or self.indices.shape[1] == self.heads
        return self.heads if own else self.kv_heads

    @property
    def width(self) -> int:
        """The most keys that a list can hold."""
        block, reach = min(self.kv_block, self.kv_len), min(self.reach, self.kv_len)
        return self.indices.shape[-1] * block + reach

    @property
    def ready(self) -> bool:
        """Whether the selection's own indices are the lists already."""
        return self.rule.rule is None and self.q_block == self.kv_block == 1 and not self.reach

    def visible(self, first: int, last: int) -> Tensor:
        """int32 ``[B or 1, H, n, width]``: the keys that queries ``first … last - 1`` see, or -1.

        H is 1 (one list for all heads), the number of KV heads, or of query heads. No key occurs twice
        in a list.
        """
        if self.ready:
            return self.indices[:, :, first:last]
        rows = torch.arange(first, last, device=self.indices.device)
        block = min(self.kv_block, self.kv_len)
        keys, seen = self._positions(self.indices[:, :, rows // self.q_block], block)
        at = rows[:, None]
        listed = torch.where(seen & self._allowed(at, keys), keys, -1)
        if self.reach:
            near, within = self._near(at)
            alone = (listed < 0).all(-1, keepdim=True)
            near = torch.where(alone & within & self._allowed(at, near), near, -1)
            sizes = [max(pair) for pair in zip(listed.shape[:3], near.shape[:3], strict=True)]
            listed = torch.cat([x.expand(*sizes, -1) for x in (listed, near)], -1)
        return listed.to(torch.int32)

    def seen(self) -> Tensor:
        """uint8 ``[B, L, R, K, kv_block / 8]``, L being `lists`: which keys of its candidates each query
        sees, key by key as bits. For rows of single queries, blocks of whole bytes, and no fallback.
        """
        rows = torch.arange(self.indices.shape[2], device=self.indices.device)[:, None]
        keys, there = self._positions(self.indices, self.kv_block)
        bits = (there & self._allowed(rows, keys)).unflatten(
            -1, (self.indices.shape[3], self.kv_block // 8, 8)
        )
        place = torch.arange(8, dtype=torch.uint8, device=keys.device)
        packed = torch.bitwise_left_shift(bits.to(torch.uint8), place).sum(-1, dtype=torch.uint8)
        return self._spread(packed)

    def chosen(self) -> Tensor:
        """int32 ``[B, L, R, K]``: the candidates of each list."""
        return self._spread(self.indices).contiguous()

    def _spread(self, x: Tensor) -> Tensor:
        """For every sequence and list, what may be said once for several."""
        if x.shape[1] not in (1, self.lists):
            x = x.repeat_interleave(self.lists // x.shape[1], 1)
        return x.expand(self.batch, self.lists, *x.shape[2:])

    def _positions(self, chosen: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, n, K * block]`` of candidates, and which of them there are."""
        within = torch.arange(block, device=chosen.device)
        keys = (chosen.to(torch.int64)[..., None] * block + within).flatten(-2)
        if self.rule.uses_head and keys.shape[1] not in (1, self.heads):
            keys = keys.repeat_interleave(self.heads // keys.shape[1], 1)
        # Below 0 lies what an unused slot would stand for.
        return keys, (keys >= 0) & (keys < self.kv_len)

    def _near(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The last ``reach`` keys up to each query's own, ``[B or 1, 1, n, …]``."""
        position = at
        if self.rule.offset != "none":
            b = torch.arange(self.tables[0].numel(), device=at.device).view(-1, 1, 1, 1)
            position = at + offset_of(self.tables[0], self.rule.offset, b)
        position = position.to(torch.int64).expand(*([1] * (4 - position.ndim)), *position.shape)
        back = torch.arange(min(self.reach, self.kv_len), device=at.device)
        keys = position.clamp(max=self.kv_len - 1) - back
        return keys, (keys >= 0) & (position - keys < self.reach)

    def _allowed(self, at: Tensor, keys: Tensor) -> Tensor:
        """What the rule says of queries ``at [n, 1]`` and ``keys [B, H, n, w]``."""
        if self.rule.rule is None:
            return keys == keys
        # Asked about no batch or head but those it can tell apart, and about no key that is not there.
        batch = self.batch if self.rule.uses_batch else 1
        heads = self.heads if self.rule.uses_head else 1
        b = torch.arange(batch, device=at.device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=at.device).view(1, -1, 1, 1)
        kept = keys.clamp(min=0, max=self.kv_len - 1)
        return self.rule.mod(self.tables)(b, h, at.expand(1, 1, -1, 1), kept)
