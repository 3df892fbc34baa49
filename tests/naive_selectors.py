"""What selectors choose, by their definitions: one query, one head, one block at a time, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.selectors import Mass, Tiles

LENGTHS = [(1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (5, 200), (1, 200)]
INPUTS = ["random", "tied", "constant", "adversarial"]
SHARING = ["shared", "kv", "query"]
HEADS, KV_HEADS, DIM = 4, 2, 16


def drawn(kind: str, q_len: int, kv_len: int, *, batch: int = 2) -> tuple[Tensor, Tensor]:
    """q and k; the dimension is 16, so that scaling is exact."""
    draw = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    shapes = (batch, HEADS, q_len, DIM), (batch, KV_HEADS, kv_len, DIM)
    if kind == "tied":
        # Few different numbers, all exact: many blocks are equally good.
        q, k = (torch.randint(-1, 2, shape, generator=draw).float() for shape in shapes)
        return q, k[:, :, torch.arange(kv_len) % 3]
    if kind == "constant":
        return torch.ones(shapes[0]), torch.ones(shapes[1])
    q, k = (torch.randn(shape, generator=draw) for shape in shapes)
    if kind == "adversarial":
        # One key outweighs all others, one points away from all, channels differ by 1e4.
        k[:, :, kv_len // 2] *= 40
        k[:, :, -1] = -k[:, :, kv_len // 2]
        q, k = q * torch.logspace(-2, 2, DIM), k * torch.logspace(2, -2, DIM)
    return q, k


def lists_of(heads: str) -> list[list[int]]:
    """The query heads of each list."""
    return {
        "shared": [list(range(HEADS))], "kv": [[0, 1], [2, 3]], "query": [[h] for h in range(HEADS)]
    }[heads]  # fmt: skip


def positions(grid: fs.Grid, b: int) -> list[int]:
    every = grid.positions()
    return [int(p) for p in every[b if len(every) > 1 else 0]]


def rows_of(length: int, block: int) -> list[range]:
    return [range(s, min(s + block, length)) for s in range(0, length, block)]


def sets(selection: fs.Selection) -> list[list[list[set[int]]]]:
    """``[b][h][r]``, judged to be sets: rising, and -1 afterwards."""
    found = []
    for lists in selection.indices.tolist():
        found.append([[_set(row) for row in rows] for rows in lists])
    return found


def _set(row: list[int]) -> set[int]:
    used = [c for c in row if c >= 0]
    assert row == sorted(set(used)) + [-1] * (len(row) - len(used))
    return set(used)


def kept(
    score: dict[int, float],
    budget: Any,
    mass: dict[int, float],
    forced: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[int]:
    """The blocks of one row in the order in which they are taken; ``score`` holds those within reach."""
    order = sorted(score, key=lambda c: (0, 0.0, c) if c in forced else (1, -score[c], c))
    if isinstance(budget, Mass):
        total, upto, count = sum(mass[c] for c in order), 0.0, 0
        for c in order:
            if upto >= budget.share * total:
                break
            upto, count = upto + mass[c], count + 1
        count = max(count, budget.least, len(forced & score.keys()))
        return order[: count if budget.most is None else min(count, budget.most)]
    if isinstance(budget, float):
        return order[: math.ceil(budget * len(order))]
    return order[:budget]


def exponentials(score: dict[int, float]) -> dict[int, float]:
    top = max(score.values(), default=0.0)
    return {c: math.exp(s - top) for c, s in score.items()}


def walked(
    scores: list[dict[int, float]], budgets: list[int], tiles: Tiles, block: int
) -> list[set[int]]:
    """One query tile's rows under a budget of tiles, pair after pair in order of score."""
    per = tiles.kv_tile // block
    takes = [set(kept(score, n, {})) for score, n in zip(scores, budgets, strict=True)]
    best: dict[int, float] = {}
    for score, own in zip(scores, takes, strict=True):
        for c in own:
            best[c // per] = max(best.get(c // per, -math.inf), score[c])
    worth = {t: s + tiles.contiguity * ((t - 1 in best) + (t + 1 in best)) for t, s in best.items()}
    if tiles.contiguity == 0:
        # Pair after pair: a tile opens when the first pair in it is met.
        pairs = sorted(
            ((-score[c], c, r) for r, score in enumerate(scores) for c in takes[r]),
        )
        opened: list[int] = []
        for _, c, _ in pairs:
            if c // per not in opened and len(opened) < tiles.most:
                opened.append(c // per)
    else:
        opened = sorted(worth, key=lambda t: (-worth[t], t))[: tiles.most]
    found = []
    for score, n in zip(scores, budgets, strict=True):
        inside = {c: s for c, s in score.items() if c // per in opened}
        found.append(set(kept(inside, n, {})) or set(kept(score, 1, {})))
    return found


def attention(q: Tensor, k: Tensor, visible: list[int]) -> dict[int, float]:
    """The softmax weights of one query ``[D]`` over the keys of ``k [S, D]`` it sees."""
    logits = {s: float(q.double() @ k[s].double()) / math.sqrt(len(q)) for s in visible}
    weights = exponentials(logits)
    total = sum(weights.values())
    return {s: w / total for s, w in weights.items()}


Scored = Callable[[int, int, range, int], float]


def by_blocks(
    q: Tensor, k: Tensor, grid: fs.Grid, heads: str, block: int, q_block: int, scored: Scored
) -> list[list[list[dict[int, float]]]]:
    """``[b][list][row]``: the score of each block that a causal row reaches; ``scored(b, h, keys, i)``
    is that of one query, and a row takes the highest of its queries and heads."""
    found = []
    for b in range(q.shape[0]):
        p = positions(grid, b)
        found.append(
            [
                [
                    {
                        c: max(scored(b, h, keys, i) for h in own for i in row)
                        for c, keys in enumerate(rows_of(grid.kv_len, block))
                        if keys[0] <= p[row[-1]]
                    }
                    for row in rows_of(grid.q_len, q_block)
                ]
                for own in lists_of(heads)
            ]
        )
    return found
