"""H2O: keep the keys that have gathered the most attention so far, and the latest.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", 2023, 4.1 and Algorithm 1, https://arxiv.org/abs/2306.14048, with the accumulated attention of
its 4.1 as the score. The paper evicts after each query; here before the next one, which is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.errors import check_number
from flexsparse.grid import Grid
from flexsparse.intervals import reach
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing, per_list
from flexsparse.selectors.caches import KeyCache
from flexsparse.selectors.parts import query_parts
from flexsparse.selectors.physical import Keep


@dataclass(frozen=True, eq=False, kw_only=True)
class H2O(Selector):
    """Each query reads its ``recent`` latest keys, its own among them, and the ``heavy`` heaviest others.

    Where fewer of the latest are within reach, heavier ones take their places.
    A key weighs what the queries before have given it, each by a softmax over what it read itself.
    A key that one query leaves out never comes back. Lists are of single keys for single queries;
    those that share a list (``heads``) add up their attention. ``scale`` is the attention's, by default
    ``D ** -0.5``. ``recent`` counts the query's own key: the authors' ``recent_size`` is one less.

    Queries come one after the other: the first of ``q`` has seen nobody before it. To decode, tell a
    cache every query, in order.
    """

    heavy: int = 64
    recent: int = 64
    heads: Heads = "kv"
    scale: float | None = None
    block: int = field(init=False, default=1)
    q_block: int = field(init=False, default=1)
    keep: Keep = field(init=False, default=1)

    def __post_init__(self) -> None:
        check_number("H2O", "heavy", self.heavy, int, 0)
        check_number("H2O", "recent", self.recent, int, 1)
        check_sharing("H2O", self.heads)
        object.__setattr__(self, "keep", self.heavy + self.recent)
        super().__post_init__()

    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        return self.cache(k).select(q, grid, rule)

    def cache(self, k: Tensor, capacity: int | None = None) -> HeavyCache:
        return HeavyCache(self, k, capacity)


class HeavyCache(KeyCache):
    """The keys, what each has gathered, and who is still there; `select` moves all of it on."""

    selector: H2O

    def _select(self, q: Tensor, grid: Grid, rule: MaskMod | None) -> Selection:
        kv_heads = self.keys.shape[1]
        heads = {"shared": 1, "kv": kv_heads, "query": q.shape[1]}[self.selector.heads]
        if not hasattr(self, "mass"):
            shape = (q.shape[0], heads, self.capacity)
            self.mass = torch.zeros(shape, device=q.device)
            self.there = torch.ones(shape, dtype=torch.bool, device=q.device)
        rows = []
        for part, of in query_parts(grid, 1, q.shape[0] * q.shape[1] * grid.kv_len):
            position = of.positions(q.device)[:, None, :, None]
            past = torch.arange(grid.kv_len, device=q.device) <= position
            seen = past & reach(
                rule, of, (q.shape[1], kv_heads), Span(of.q_len, grid.kv_len, 1, 1), q.device
            )
            reachable = past & self.selector.within_reach(q, self.keys, of, rule, heads)
            queries = q[:, :, part]
            rows += [
                self._step(
                    queries[:, :, i], *(x[:, :, i : i + 1] for x in (position, seen, reachable))
                )
                for i in range(of.q_len)
            ]
        return Selection.from_indices(
            torch.cat(rows, 2), kv_len=grid.kv_len, q_len=grid.q_len, out_of_range="drop"
        )

    def _step(self, q: Tensor, position: Tensor, seen: Tensor, reachable: Tensor) -> Tensor:
        """One query's list ``[B, H, 1, K]``; adds its attention, and drops who is not on the list."""
        of, kv_len = self.selector, seen.shape[-1]
        key = torch.arange(kv_len, device=q.device)
        latest = key > position - of.recent
        mass, there = self.mass[:, :, :kv_len], self.there[:, :, :kv_len]
        score = mass[:, :, None].masked_fill(latest, torch.inf)
        now = Grid(1, kv_len, q_offset=0, batch=q.shape[0])
        index = of.best(score, reachable & there[:, :, None], now).indices
        chosen = torch.zeros((*there.shape[:2], kv_len + 1), dtype=torch.bool, device=q.device)
        slot = torch.where(index < 0, kv_len, index).long()[:, :, 0]
        chosen.scatter_(-1, slot, True)
        there &= chosen[..., :kv_len] | (key > position[:, :, 0])
        slot = slot.clamp(max=kv_len - 1)
        weight = self._attention(q, slot, seen[:, :, 0], index[:, :, 0] >= 0)
        lists = per_list(weight[:, :, None], self.keys.shape[1], of.heads, "sum")[:, :, 0]
        mass.scatter_add_(-1, slot, lists)
        return index

    def _attention(self, q: Tensor, slot: Tensor, seen: Tensor, valid: Tensor) -> Tensor:
        """``[B, Hq, K]``: the softmax weights of one query ``[B, Hq, D]`` over its list."""
        each = q.shape[1] // slot.shape[1]
        slot, valid = slot.repeat_interleave(each, 1), valid.repeat_interleave(each, 1)
        b = torch.arange(q.shape[0], device=q.device)[:, None, None]
        h = torch.arange(q.shape[1], device=q.device)[:, None]
        keys = self.keys[b, h // (q.shape[1] // self.keys.shape[1]), slot].float()
        scale = q.shape[-1] ** -0.5 if self.selector.scale is None else self.selector.scale
        logits = (q.float()[:, :, None] * keys).sum(-1) * scale
        seen = seen.expand(*slot.shape[:2], -1).gather(-1, slot)
        return logits.masked_fill(~(valid & seen), -torch.inf).softmax(-1).nan_to_num(0.0)
