"""Reformer LSH: queries meet the keys that fall into their bucket of random directions.

Source: Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer", 2020, 2 (LSH attention),
https://arxiv.org/abs/2001.04451. The paper shares one projection between queries and keys; here a
query stands in the sorted order where a key of its hash and position would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector, check_call, pooled
from flexsparse.selectors.parts import best_in_parts, or_own, visible


@dataclass(frozen=True, eq=False, kw_only=True)
class ReformerLSH(Selector):
    """In each of ``rounds``: the keys of the query's own hash, among its sorted chunk and the one before.

    A hash is the nearest of ``buckets`` directions, drawn from ``seed``; keys are sorted by hash, then
    by position, and cut into chunks of ``chunk``. Rounds are joined as a set, which is what the paper's
    correction for repeats amounts to. The budget is at most ``2 * chunk * rounds`` keys; a smaller
    ``keep`` prefers those that meet in more rounds. One list a query head. ``shared_qk``: q and k are one
    projection, so a query's own key is seen only by who sees no other. Where they are two, a query in
    whose bucket no key is seen keeps its own as well, so that none is left with nothing while ``keep``,
    of which a row of queries has one, reaches for all of them.
    """

    buckets: int = 16
    rounds: int = 2
    chunk: int = 64
    keep: int = 256
    block: int = 1
    q_block: int = 1
    shared_qk: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("buckets", "rounds", "chunk"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    f"ReformerLSH {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.buckets % 2:
            raise ArgumentError(
                f"ReformerLSH buckets must be even, a direction and its opposite, got {self.buckets}"
            )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        q, k = (x if x.dtype == torch.float64 else x.float() for x in (q, k))
        position = grid.positions(q.device).clamp(0, grid.kv_len - 1)[:, None]
        key = torch.arange(grid.kv_len, device=q.device)
        meetings = []
        for directions in self.directions(q.shape[-1]):
            turn = directions.to(q)
            code, sought = (nearest(x @ turn) * grid.kv_len for x in (k, q))
            code, sought = code + key, sought + position
            group = q.shape[1] // k.shape[1]
            code = code.repeat_interleave(group, 1)
            order = code.sort(-1).values
            # The rank of a query is how many keys stand before it.
            rank = [torch.searchsorted(order, x.contiguous()) for x in (code, sought)]
            chunks = [x.clamp(max=grid.kv_len - 1) // self.chunk for x in rank]
            meetings.append((code // grid.kv_len, sought // grid.kv_len, *chunks))

        def score(part: slice, within: Grid) -> Tensor:
            seen = visible(rule, within, q.shape[1], q.device)
            met = torch.zeros((), device=q.device)
            for own, asked, at, where in meetings:
                behind = where[..., part, None] - at[..., None, :]
                same = asked[..., part, None] == own[..., None, :]
                met = met + (same & (behind >= 0) & (behind <= 1))
            met = met * seen
            if self.shared_qk:
                itself = within.positions(q.device)[:, None, :, None] == key
                others = (met.masked_fill(itself, 0) > 0).any(-1, keepdim=True)
                met = met.masked_fill(itself & others, 0)
            met = or_own(met, seen, within)
            met = pooled(pooled(met, self.q_block, 0.0).sum(3).mT, self.block, 0.0).sum(3).mT
            return met.masked_fill(met == 0, -torch.inf)

        return best_in_parts(self, grid, 4 * q.shape[0] * q.shape[1] * grid.kv_len, score)

    def directions(self, dim: int) -> Tensor:
        """``[rounds, dim, buckets / 2]``, drawn on the CPU, so that every device hashes alike."""
        draw = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.rounds, dim, self.buckets // 2, generator=draw, dtype=torch.float64)


def nearest(projected: Tensor) -> Tensor:
    """The largest of ``[x; -x]`` along the last axis, equal ones by the lower index."""
    both = torch.cat([projected, -projected], -1)
    index = torch.arange(both.shape[-1], device=both.device)
    best = both == both.amax(-1, keepdim=True)
    return torch.where(best, index, both.shape[-1]).amin(-1)
