"""Scores of T5, Swin, temperatures and lengths, against their papers' formulas and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from oracle import BATCH, HEADS, SIZES, dense, random_tensors
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Causal, LogLength, SwinBias, T5Bias, Temperature

Change = Callable[[Tensor], Tensor]
Case = tuple[fs.ScoreRule, Change, list[Tensor]]

CANVASES = {1: (1, 1), 7: (1, 7), 63: (7, 9), 64: (8, 8), 65: (5, 13), 200: (10, 20)}


def t5_bucket(relative: int, bidirectional: bool, buckets: int, farthest: int) -> int:
    """As T5's code has it, in its single precision; ``relative`` is key minus query."""
    bucket, distance = 0, -relative
    if bidirectional:
        buckets //= 2
        bucket += (distance < 0) * buckets
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    far = torch.log(torch.tensor(distance, dtype=torch.float32) / exact)
    far = far / math.log(farthest / exact) * (buckets - exact)
    return bucket + min(exact + int(far), buckets - 1)


@pytest.mark.parametrize(
    ("bidirectional", "buckets", "farthest"),
    [(True, 32, 128), (False, 32, 128), (True, 12, 40), (False, 9, 17), (False, 2, 3)],
)
def test_the_buckets_are_those_of_t5(bidirectional: bool, buckets: int, farthest: int) -> None:
    """Every relative position, some way past the farthest bucket."""
    reach = 2 * farthest
    score = T5Bias(torch.arange(float(buckets))[None], bidirectional, farthest)
    zero = torch.tensor(0)
    got = score(torch.tensor(0.0), zero, zero, torch.tensor(reach), torch.arange(2 * reach + 1))
    wanted = [t5_bucket(r, bidirectional, buckets, farthest) for r in range(-reach, reach + 1)]
    assert got.tolist() == wanted


def entries(bias: Tensor, index: Callable[[int, int], tuple[int, ...]], size: int) -> Tensor:
    """``bias [H, …]`` looked up pair by pair: ``[H, size, size]``."""
    rows = [
        torch.stack([bias[(slice(None), *index(i, j))] for j in range(size)], -1)
        for i in range(size)
    ]
    return torch.stack(rows, -2).double()


def t5(bidirectional: bool) -> Callable[[int], Case]:
    def make(size: int) -> Case:
        bias = torch.randn(HEADS, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
        table = entries(bias, lambda i, j: (t5_bucket(j - i, bidirectional, 8, 20),), size)
        return T5Bias(bias, bidirectional, 20), lambda s: s + table, [bias]

    return make


def swin(size: int) -> Case:
    """M = 3 along one axis and 4 along the other; longer offsets take the nearest end."""
    draw = torch.Generator().manual_seed(2)
    bias = torch.randn(HEADS, 5, 7, generator=draw).requires_grad_()
    width = CANVASES[size][1]

    def offset(i: int, j: int) -> tuple[int, int]:
        down, right = i // width - j // width, i % width - j % width
        return min(max(down, -2), 2) + 2, min(max(right, -3), 3) + 3

    table = entries(bias, offset, size)
    return SwinBias(bias, CANVASES[size]), lambda s: s + table, [bias]


def temperature(size: int) -> Case:
    return Temperature(0.7), lambda s: s / 0.7, []


def temperature_heads(size: int) -> Case:
    warm = torch.tensor([0.5, 1.0, 2.0, 0.1]).requires_grad_()
    return Temperature(warm), lambda s: s / warm.double()[:, None, None], [warm]


def positions(scores: Tensor) -> Tensor:
    size = scores.shape[-1]
    return torch.arange(size - scores.shape[-2], size, dtype=torch.float64)[:, None]


def log_length(size: int) -> Case:
    return LogLength(0.4), lambda s: s * 0.4 * (positions(s) + 1).log(), []


def log_length_heads(size: int) -> Case:
    factor = torch.tensor([0.1, 0.5, 0.3, 1.0]).requires_grad_()

    def change(s: Tensor) -> Tensor:
        return s * factor.double()[:, None, None] * (positions(s) + 1).log()

    return LogLength(factor), change, [factor]


SCORES: dict[str, Callable[[int], Case]] = {
    "t5-encoder": t5(True),
    "t5-decoder": t5(False),
    "swin": swin,
    "temperature": temperature,
    "temperature-heads": temperature_heads,
    "log-length": log_length,
    "log-length-heads": log_length_heads,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_and_its_gradients_are_those_of_its_formula(name: str, size: int) -> None:
    """out, lse, the gradients of q, k and v, and of every learned tensor, against autograd."""
    score, formula, learned = SCORES[name](size)
    inputs = [x.requires_grad_() for x in random_tensors(size, size, kv_heads=2)]
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    weight = torch.randn(BATCH, HEADS, size, 16, generator=torch.Generator().manual_seed(1))
    options = {"rule": Causal(), "score": score}
    out, lse = fs.attention(*inputs, **options, tile=32, backend="tiles", return_lse=True)
    got = torch.autograd.grad((out * weight).sum() + lse.sum(), [*inputs, *learned])
    true_out, true_lse = dense(*inputs, seen, formula)
    wanted = torch.autograd.grad((true_out * weight).sum() + true_lse.sum(), [*inputs, *learned])
    torch.testing.assert_close(out.double(), true_out, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-5, rtol=0)
    for have, want in zip(got, wanted, strict=True):
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(have, want, atol=2e-5 * scale, rtol=0)
    reference = fs.reference(*inputs, **options)
    torch.testing.assert_close(reference.out, true_out, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_knows_where_a_few_queries_stand(name: str) -> None:
    """Positions count from the sequence's start, not from the query tensor's."""
    score, formula, _ = SCORES[name](63)
    q, k, v = random_tensors(5, 63)
    seen = torch.arange(63)[None, :] <= torch.arange(58, 63)[:, None]

    def last(scores: Tensor) -> Tensor:
        whole = torch.cat([torch.zeros(*scores.shape[:2], 58, 63), scores], -2)
        return formula(whole)[..., -5:, :]

    out = fs.attention(q, k, v, rule=Causal(), score=score)
    torch.testing.assert_close(out.double(), dense(q, k, v, seen, last)[0], atol=1e-5, rtol=0)


def test_a_bias_on_a_video_and_on_a_line() -> None:
    """One axis more, or less, than an image."""
    at = torch.tensor
    line = SwinBias(torch.arange(5.0)[None], canvas=(6,))
    assert [line(at(0.0), at(0), at(0), at(3), at(j)).item() for j in (3, 5, 1, 0)] == [2, 0, 4, 4]
    table = torch.arange(27.0).view(1, 3, 3, 3)
    video = SwinBias(table, canvas=(2, 2, 2))
    assert video(at(0.0), at(0), at(0), at(0), at(7)).item() == 0
    assert video(at(0.0), at(0), at(0), at(6), at(1)).item() == table[0, 2, 2, 0]


def test_a_query_before_the_first_key_keeps_its_score_finite() -> None:
    """Queries may stand before the keys, where a call's offset is negative."""
    q, k, v = random_tensors(3, 6)
    out = fs.attention(q, k, v, score=LogLength(1.0), q_offset=-2)
    assert out.isfinite().all()
