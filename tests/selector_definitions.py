"""Published selectors as their papers define them: one query after the other, in fp64; nothing of the library.

Each gives, for the queries of one row and the heads of one list, what every block is worth. ``q [Hq, Q, D]``
and ``k [Hkv, S, D]`` are of one sequence, ``queries`` the row's indices, ``at`` their positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Worth = dict[int, float]


@dataclass(frozen=True)
class Row:
    q: Tensor
    k: Tensor
    heads: list[int]
    queries: list[int]
    at: list[int]
    block: int

    @property
    def blocks(self) -> list[range]:
        """The keys of each block."""
        length = self.k.shape[1]
        return [range(c, min(c + self.block, length)) for c in range(0, length, self.block)]

    @property
    def past(self) -> set[int]:
        """Blocks that begin no later than the last query stands."""
        return {c for c, keys in enumerate(self.blocks) if keys[0] <= self.at[-1]}

    def near(self, first: int, local: int) -> set[int]:
        """The first blocks, and of each query its own and those just before."""
        found = set(range(first))
        for p in self.at:
            found |= set(range(p // self.block - local + 1, p // self.block + 1))
        return found & self.past

    def keys(self, head: int) -> Tensor:
        return self.k[head // (self.q.shape[0] // self.k.shape[0])]

    def pairs(self) -> list[tuple[int, int, int]]:
        """(head, query, its position)."""
        return [(h, t, p) for h in self.heads for t, p in zip(self.queries, self.at, strict=True)]


def moba(row: Row) -> Worth:
    worth = {}
    for c, keys in enumerate(row.blocks):
        gates: list[float] = []
        for h in row.heads:
            mean = row.keys(h)[keys[0] : keys[-1] + 1].mean(0)
            gates += (row.q[h, row.queries] @ mean).tolist()
        worth[c] = max(gates)
    return worth


def window_mass(row: Row, h: int, t: int, p: int, length: int, stride: int) -> list[float]:
    """Softmax over the mean keys of whole windows that end no later than the query stands."""
    keys = row.keys(h)
    if keys.shape[0] < length or p < length - 1:
        return []
    whole = keys.unfold(0, length, stride).mean(-1)
    seen = [i for i in range(len(whole)) if i * stride + length - 1 <= p]
    scores = (whole[seen] @ row.q[h, t] / math.sqrt(row.q.shape[-1])).tolist()
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / sum(weights) for w in weights]


def nsa(row: Row, length: int, stride: int, alignment: str) -> Worth:
    worth = dict.fromkeys(range(len(row.blocks)), 0.0)
    for h, t, p in row.pairs():
        mass = window_mass(row, h, t, p, length, stride)
        if alignment == "overlap":
            # A window speaks for the block of each of its strides.
            for i, m in enumerate(mass):
                for n in range(length // stride):
                    worth[(i + n) * stride // row.block] += m
            continue
        for j in worth:
            for m in range(row.block // stride):
                for n in range(length // stride):
                    i = row.block // stride * j - m - n
                    worth[j] += mass[i] if 0 <= i < len(mass) else 0.0
    return worth


def infllm_v2(row: Row, length: int, stride: int) -> Worth:
    total: dict[int, float] = {}
    for h, t, p in row.pairs():
        for i, m in enumerate(window_mass(row, h, t, p, length, stride)):
            total[i] = total.get(i, 0.0) + m
    worth = {}
    for j, keys in enumerate(row.blocks):
        end = keys[0] + row.block
        # The windows that share a key with the block.
        over = [m for i, m in total.items() if i * stride < end and i * stride + length > keys[0]]
        worth[j] = max(over, default=0.0)
    return worth


def msa(row: Row, index_q: Tensor, index_k: Tensor) -> Worth:
    """``index_q [Q, E]`` of the group, ``index_k [S, E]``."""
    scores = (index_q[row.queries] @ index_k.mT).tolist()
    return {c: max(s[i] for s in scores for i in keys) for c, keys in enumerate(row.blocks)}


@dataclass(frozen=True)
class Sparge:
    """What a head keeps for sure, and what it may keep where weights are equal."""

    sure: set[int]
    maybe: set[int]


def sparge(
    row: Row, head: int, *, mass: float | None, share: float | None, similarity: float, first: int
) -> Sparge:
    q, keys = row.q[head, row.queries], row.keys(head)
    reach = row.past
    alike = {
        c for c, b in enumerate(row.blocks) if mean_cosine(keys[b[0] : b[-1] + 1]) > similarity
    }
    if mean_cosine(q) <= similarity:
        return Sparge(reach, reach)
    scores = {
        c: float(q.mean(0) @ keys[b[0] : b[-1] + 1].mean(0)) / math.sqrt(q.shape[-1])
        for c, b in enumerate(row.blocks)
        if c in alike & reach
    }
    peak = max(scores.values(), default=0.0)
    total = sum(math.exp(s - peak) for s in scores.values())
    weights = dict.fromkeys(range(len(row.blocks)), 0.0)
    weights |= {c: math.exp(s - peak) / total for c, s in scores.items()}
    falling = sorted(weights.values(), reverse=True)
    if share is not None:
        count = math.floor(share * len(weights))
    else:
        sums = [sum(falling[: i + 1]) for i in range(len(falling))]
        assert all(abs(s - mass) > 1e-9 for s in sums), "choose a mass that no sum meets"
        count = sum(s <= mass for s in sums)
    cut = falling[max(count, 1) - 1]
    forced = (set(weights) - alike) | set(range(first))
    sure = {c for c, w in weights.items() if w > cut + 1e-12}
    maybe = {c for c, w in weights.items() if w >= cut - 1e-12}
    return Sparge((sure | forced) & reach, (maybe | forced) & reach)


def mean_cosine(x: Tensor) -> float:
    """The mean of the whole matrix of cosines, each token with itself among them."""
    length = x.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, x / length.clamp(min=1e-12), 0.0)
    return float((unit @ unit.mT).mean())


def right_choice(
    got: set[int], worth: Worth, allowed: set[int], forced: set[int], keep: int
) -> None:
    """A top-k: as many as there can be, the forced ones among them, and nothing better left out."""
    must = sorted(forced & allowed)
    assert got <= allowed
    assert len(got) == min(keep, len(allowed))
    if len(must) >= keep:
        assert got == set(must[:keep])
        return
    assert set(must) <= got
    kept, left = got - set(must), allowed - got
    if kept and left:
        worst, best = min(worth[c] for c in kept), max(worth[c] for c in left)
        assert worst >= best - 1e-12 * max(1.0, abs(best)), (worst, best)


def exact_choice(
    got: set[int], worth: Worth, allowed: set[int], forced: set[int], keep: int
) -> None:
    """The same where arithmetic is exact: equal ones go to the lower index."""
    order = sorted(allowed, key=lambda c: (c not in forced, -worth[c], c))
    assert got == set(order[:keep])
