"""What selectors compute with: the best columns, peaks of rows, masses of blocks; against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsparse.kernels.block_mass import Around, block_mass
from flexsparse.kernels.row_peaks import row_peaks
from flexsparse.kernels.top_k import top_k

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTHS = [1, 7, 63, 64, 65, 200]
each_device = pytest.mark.parametrize("where", DEVICES)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scores(kind: str, columns: int) -> Tensor:
    score = drawn(2, 3, 5, columns)
    if kind == "tied":
        return score.sign() * (score.abs() > 0.7)
    if kind == "constant":
        return torch.zeros_like(score)
    if kind == "hard":
        hard = (torch.nan, torch.inf, -torch.inf, -0.0, torch.finfo(score.dtype).max)
        for seed, value in enumerate(hard, 1):
            score[drawn(*score.shape, seed=seed) > 1] = value
    return score.bfloat16() if kind == "half" else score.double() if kind == "double" else score


def best(row: list[float], reach: list[bool], forced: list[bool], keep: int) -> list[int]:
    """By the order in which columns are taken."""

    def place(c: int) -> tuple[int, float, int]:
        return (0, 0.0, c) if forced[c] else (2, 0.0, c) if row[c] != row[c] else (1, -row[c], c)

    there = [c for c in range(len(row)) if reach[c] and (forced[c] or row[c] != -math.inf)]
    return sorted(sorted(there, key=place)[:keep])


@each_device
@pytest.mark.parametrize("kind", ["random", "tied", "constant", "hard", "half", "double"])
@pytest.mark.parametrize("columns", WIDTHS)
def test_the_best_columns(columns: int, kind: str, where: str) -> None:
    score = scores(kind, columns)
    # The highest number stands for infinity too: they are equal.
    limit = torch.finfo(score.dtype).max
    plain = score.double().clamp(max=limit)
    reach = drawn(1, 3, 5, columns, seed=1) < 0.5
    forced = drawn(1, 1, 5, columns, seed=2) > 1
    every = torch.ones_like(score, dtype=torch.bool)
    for width in (1, 3, columns, columns + 5):
        count = (drawn(2, 3, 5, seed=3).abs() * width).long()
        for hides, puts, counts in (
            (None, None, None), (reach, None, None), (None, forced, count), (reach, forced, count),
        ):  # fmt: skip
            given = [None if x is None else x.to(where) for x in (hides, puts, counts)]
            chosen = top_k(score.to(where), width, reach=given[0], forced=given[1], count=given[2])
            assert chosen.dtype == torch.int32 and chosen.shape == (2, 3, 5, width)
            seen = (every if hides is None else hides.expand_as(every)).tolist()
            first = (~every if puts is None else puts.expand_as(every)).tolist()
            for b, lists in enumerate(chosen.tolist()):
                for h, rows in enumerate(lists):
                    for r, row in enumerate(rows):
                        keep = width if counts is None else min(width, int(counts[b, h, r]))
                        want = best(plain[b, h, r].tolist(), seen[b][h][r], first[b][h][r], keep)
                        assert row == want + [-1] * (width - len(want))


def rounding(q: Tensor, *keys: Tensor) -> float:
    """What a product may be off in fp32: each term and each sum of D cuts off one bit of 24."""
    size = max(
        float((q.double().abs().flatten(0, 2) @ k.double().abs().flatten(0, 2).mT).max())
        for k in keys
    )
    return q.shape[-1] * 2.0**-23 * size


def near(got: Tensor, want: Tensor, error: float) -> None:
    assert got.shape == want.shape
    assert float((got.cpu().double() - want).abs().max()) <= error


PEAKS: list[Any] = [
    # queries, columns, q_block, heads, KV heads, share, dimension
    (1, 65, 1, 8, 2, 4, 128),
    (65, 7, 64, 8, 2, 4, 16),
    (200, 63, 7, 6, 2, 3, 24),
    (63, 64, 1, 4, 2, 1, 64),
    (7, 200, 3, 4, 2, 4, 80),
    (64, 1, 200, 4, 4, 1, 32),
]


@each_device
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", PEAKS)
def test_peaks_of_rows(form: Any, kind: torch.dtype, where: str) -> None:
    length, columns, q_block, heads, kv_heads, share, dim = form
    q = drawn(2, heads, length, dim).to(kind)
    # A slice, as of a cache with room for more.
    low = drawn(2, kv_heads, columns + 1, dim)
    for bounds, keys in ((True, low.to(kind)), (False, low.to(kind)), (False, low)):
        a = keys[:, :, :columns]
        b = (a.double() + drawn(2, kv_heads, columns, dim).abs()).to(kind) if bounds else None
        got = row_peaks(
            q.to(where), keys.to(where)[:, :, :columns], None if b is None else b.to(where), q_block,
            share, 0.5,
        )  # fmt: skip
        want = torch.full(
            (2, heads // share, math.ceil(length / q_block), columns), -torch.inf
        ).double()
        for h in range(heads):
            g = h * kv_heads // heads
            for i in range(length):
                x = q[:, h, i, None].double()
                each = x * a[:, g].double()
                if b is not None:
                    each = torch.maximum(each, x * b[:, g].double())
                at = want[:, h // share, i // q_block]
                at.copy_(torch.maximum(at, each.sum(-1) * 0.5))
        near(got, want, 0.5 * rounding(q, *(x for x in (a, b) if x is not None)))


def around(length: int, stride: int, block: int, *, paper: bool = False) -> Around:
    step, per = block // stride, length // stride
    start = 2 - step - per if paper else 1 - per
    return Around(length, stride, step, start, step + per - 1, min(step, per))


MASSES: list[Any] = [
    # queries, keys, q_block, heads, KV heads, share, dimension, windows
    (7, 65, 1, 8, 2, 4, 16, around(8, 4, 16)),
    (65, 200, 64, 4, 2, 2, 24, around(4, 2, 8, paper=True)),
    (1, 200, 1, 6, 2, 3, 128, around(8, 4, 16)),
    (63, 64, 3, 4, 2, 1, 16, around(4, 4, 4)),
    (20, 63, 5, 4, 2, 4, 16, around(4, 2, 64)),
    (64, 7, 1, 4, 1, 4, 16, around(8, 4, 8)),
]


@each_device
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("form", MASSES)
def test_masses_of_blocks(form: Any, how: Any, kind: torch.dtype, where: str) -> None:
    length, keys, q_block, heads, kv_heads, share, dim, of = form
    count, blocks = (
        max(0, (keys - of.length) // of.stride + 1),
        math.ceil(keys / of.step / of.stride),
    )
    q, k = drawn(2, heads, length, dim).to(kind), drawn(2, kv_heads, count, dim).to(kind)
    position = torch.arange(length)[None] + torch.tensor([[0], [keys - length]])
    got = block_mass(
        q.to(where), k.to(where), position.to(where), of, how, blocks, q_block, share, 0.3
    )
    rows = math.ceil(length / q_block)
    held = torch.zeros(2, heads // share, rows, count, dtype=torch.float64)
    lse = torch.full((2, heads, length), -torch.inf, dtype=torch.float64)
    for b in range(2):
        for h in range(heads):
            for i, p in enumerate(position[b].tolist()):
                seen = [n for n in range(count) if n * of.stride + of.length - 1 <= p]
                if seen:
                    logit = k[b, h * kv_heads // heads, seen].double() @ q[b, h, i].double() * 0.3
                    held[b, h // share, i // q_block, seen] += logit.softmax(-1)
                    lse[b, h, i] = logit.logsumexp(-1)
    want = torch.zeros(*held.shape[:3], blocks, dtype=torch.float64)
    for j in range(blocks):
        for m in range(of.width):
            n = j * of.step + of.start + m
            if 0 <= n < count and how == "sum":
                want[..., j] += min(m + 1, of.width - m, of.rise) * held[..., n]
            elif 0 <= n < count:
                want[..., j] = torch.maximum(want[..., j], held[..., n])
    # What a logit is off, its weight is off in proportion, and so is what it is divided by.
    off = 0.3 * rounding(q, k) if count else 0.0
    error = (2 * off + 2**-20) * max(1.0, float(want.max()))
    near(got, want, error)
    told = block_mass(
        q.to(where), k.to(where), position.to(where), of, how, blocks, q_block, share, 0.3,
        lse.to(where, torch.float32) + math.log(2),
    )  # fmt: skip
    near(told, want / 2, error)
