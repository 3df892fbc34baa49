"""Published selection methods written out plainly, one head and one pair at a time, in fp64.

Nothing of the library is imported here. ``scores[i][j]`` are the scaled products of one head,
``seen(i, j)`` is what the rule lets query i see, ``at`` is the position of query 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from torch import Tensor

Seen = Callable[[int, int], bool]
Weights = list[list[float]]


def products(q: Tensor, k: Tensor, scale: float | None = None) -> Weights:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    made: Weights = (q.double() @ k.double().T * scale).tolist()
    return made


def softmax(row: Sequence[float], seen: Sequence[bool]) -> list[float]:
    """0 for what is not seen, and everywhere where nothing is."""
    if not any(seen):
        return [0.0] * len(row)
    peak = max(x for x, s in zip(row, seen, strict=True) if s)
    mass = [math.exp(x - peak) if s else 0.0 for x, s in zip(row, seen, strict=True)]
    return [x / math.fsum(mass) for x in mass]


def blocks(length: int, size: int) -> list[range]:
    return [range(i, min(i + size, length)) for i in range(0, length, size)]


def falling(mass: Sequence[float], first: Iterable[int] = ()) -> list[int]:
    """``first``, then the others from the highest; equal ones, up to rounding, by index."""
    always = sorted(set(first))
    rest = [i for i in range(len(mass)) if i not in always]
    return always + sorted(rest, key=lambda i: (-round(mass[i], 11), i))


def cover(mass: Sequence[float], share: float, first: Iterable[int] = ()) -> set[int]:
    """In falling order, while what came before is below ``share`` of all."""
    first = set(first)
    chosen, before, total = set(first), 0.0, math.fsum(mass)
    for i in falling(mass, first):
        if before < share * total:
            chosen.add(i)
        before += mass[i]
    return chosen


def below(mass: Sequence[float], share: float) -> set[int]:
    """In falling order, while what came before, and the entry itself, is within ``share`` of all."""
    chosen, so_far, total = set(), 0.0, math.fsum(mass)
    for i in falling(mass):
        so_far += mass[i]
        if so_far <= share * total:
            chosen.add(i)
    return chosen


def touched(pairs: Seen, rows: list[range], columns: list[range]) -> list[set[int]]:
    """Per row of queries the blocks with at least one pair."""
    return [
        {c for c, keys in enumerate(columns) if any(pairs(i, j) for i in row for j in keys)}
        for row in rows
    ]


def antidiagonal_mass(
    q: Tensor, k: Tensor, stride: int, seen: Seen, rows: list[range], columns: list[range]
) -> Weights:
    """XAttention: per row and block the softmax over cells, a cell scored by its antidiagonal."""
    scores = products(q, k)
    cells_q, cells_k = blocks(len(q), stride), blocks(len(k), stride)
    weights = []
    for queries in cells_q:
        line, visible = [], []
        for keys in cells_k:
            pairs = list(product(queries, keys))
            line.append(
                sum(scores[i][j] for i, j in pairs if i % stride + j % stride == stride - 1)
                / stride
            )
            visible.append(any(seen(i, j) for i, j in pairs))
        weights.append(softmax(line, visible))
    return [
        [
            math.fsum(
                weights[m][n]
                for m, queries in enumerate(cells_q)
                if queries[0] in row
                for n, keys in enumerate(cells_k)
                if keys[0] in column
            )
            for column in columns
        ]
        for row in rows
    ]


def sampled(q: Tensor, k: Tensor, count: int, seen: Seen, at: int) -> dict[int, list[float]]:
    """The causal softmax of the last ``count`` queries, by query."""
    scores = products(q, k)
    return {
        i: softmax(scores[i], [j <= at + i and seen(i, j) for j in range(len(k))])
        for i in range(max(0, len(q) - count), len(q))
    }


def column_sums(weights: dict[int, list[float]], kv_len: int) -> list[float]:
    return [math.fsum(row[j] for row in weights.values()) for j in range(kv_len)]


def diagonal_sums(weights: dict[int, list[float]], kv_len: int, at: int) -> list[float]:
    """By the distance from query back to key."""
    return [
        math.fsum(row[at + i - d] for i, row in weights.items() if 0 <= at + i - d < kv_len)
        for d in range(kv_len)
    ]


def means(x: Tensor, size: int) -> Tensor:
    return x.double().new_tensor(
        [x.double()[b.start : b.stop].mean(0).tolist() for b in blocks(len(x), size)]
    )


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """The square root of the Jensen-Shannon divergence."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        m = (a + b) / 2
        total += sum(x * math.log(x / m) / 2 for x in (a, b) if x > 0)
    return math.sqrt(max(total, 0.0))


def rounded(k: Tensor, bits: int) -> Tensor:
    """Each key at ``2 ** bits`` levels between its lowest and highest channel."""
    rows = []
    for key in k.double().tolist():
        low, high = min(key), max(key)
        step = (high - low) / (2**bits - 1)
        rows.append([low + round((x - low) / step) * step if step else low for x in key])
    return k.double().new_tensor(rows)
