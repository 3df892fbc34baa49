"""Attention over tiles whose pairs ask for membership, single keys being the candidates.

A code generator that asks pair by pair loads a word for each of them. Here a word is loaded once and spread
over the eight rows that it speaks of, in the registers in which their scores stand. A program holds some rows
and walks their list.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div


class Pieces(NamedTuple):
    """Rows and keys that a program multiplies at once, its warps, and the stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int


LOG2_E = math.log2(math.e)
# Measured on Hopper in bf16 with head dims of 128; see configs/bench/RESULTS.md.
FORWARD = Pieces(64, 64, 4, 3)


class Words(NamedTuple):
    """Membership bits ``[B or 1, Hkv or Hq or 1, ceil(Q / 8), S]``; ``fold`` KV heads stand in the kernel's
    batch, and each ``sharing`` query heads read one list of them. With ``causal`` no later key counts."""

    bits: Tensor
    fold: int
    sharing: int
    causal: bool


@triton.jit
def words_of(words, b, h, heads, word_b, word_h, sharing, FOLD: tl.constexpr):
    """Where the words of a kernel's entry and head begin."""
    if FOLD > 1:
        return words + b // FOLD * word_b + (b % FOLD * heads + h) // sharing * word_h
    return words + b * word_b + h // sharing * word_h


@triton.jit
def counts_of(some, full):
    """The partial tiles of a list, and all."""
    partial = tl.load(some)
    return partial, partial + tl.load(full)


@triton.jit
def listed(some_at, full_at, partial, slot):
    """The tile in a slot of a list, whose ``partial`` ones come first."""
    return tl.load(tl.where(slot < partial, some_at + slot, full_at + slot - partial))


@triton.jit
def seen_by_row(
    words, first_row, row, key, width, row_words, kv_len,
    M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """bool ``[M, N]``: which keys the rows from ``first_row`` on see."""
    word = first_row // 8 + tl.arange(0, M // 8)
    at = word[:, None].to(tl.int64) * width + key[None, :]
    there = (word < row_words)[:, None] & (key < kv_len)[None, :]
    byte = tl.load(words + at, mask=there, other=0).to(tl.int32)
    bit = byte[:, None, :] & (1 << tl.arange(0, 8))[None, :, None]
    seen = tl.reshape(bit, [M, N]) != 0
    if CAUSAL:
        seen = seen & (key[None, :] <= row[:, None])
    return seen


@triton.jit
def _forward(
    q, k, v, out, lse, words, some, some_at, full, full_at,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_r, lse_b, lse_h,
    word_b, word_h, width, row_words, num_b, num_h, idx_b, idx_h, idx_r, full_b, full_h, full_r,
    heads, group, sharing, q_len, kv_len, scale,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, FOLD: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * M
    lane = tl.program_id(1).to(tl.int64)
    b = lane // heads
    h = lane % heads
    row = first_row + tl.arange(0, M)
    mine = row < q_len
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    to_q = q + b * q_b + h * q_h + row[:, None].to(tl.int64) * q_r + d[None, :]
    queries = tl.load(to_q, mask=mine[:, None], other=0.0)
    own = words_of(words, b, h, heads, word_b, word_h, sharing, FOLD)
    to_k = k + b * k_b + h // group * k_h
    to_v = v + b * v_b + h // group * v_h
    at = first_row // Q_TILE
    at_num = b * num_b + h * num_h + at
    partial, number = counts_of(some + at_num, full + at_num)
    of_some = some_at + b * idx_b + h * idx_h + at * idx_r
    of_full = full_at + b * full_b + h * full_h + at * full_r
    STEPS: tl.constexpr = KV_TILE // N
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, DV], tl.float32)
    for step in range(number * STEPS):
        slot = step // STEPS
        column = listed(of_some, of_full, partial, slot)
        key = column * KV_TILE + step % STEPS * N + tl.arange(0, N)
        there = (key < kv_len)[:, None]
        place = (key.to(tl.int64) if FAR else key)[:, None]
        keys = tl.load(to_k + place * k_s + d[None, :], mask=there, other=0.0)
        values = tl.load(to_v + place * v_s + e[None, :], mask=there, other=0.0)
        seen = seen_by_row(own, first_row, row, key, width, row_words, kv_len, M, N, CAUSAL)
        scores = tl.where(seen, tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        # A query that has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weight, 1)
        sums = tl.dot(weight.to(values.dtype), values, sums * shrink[:, None])
        peak = new
    whole = tl.where(mass == 0.0, 1.0, mass)
    # Scores are in powers of two here, lse in natural logarithms.
    natural = tl.where(mass == 0.0, float("-inf"), (peak + tl.log2(whole)) * 0.6931471805599453)
    to_out = out + b * o_b + h * o_h + row[:, None].to(tl.int64) * o_r + e[None, :]
    tl.store(to_out, (sums / whole[:, None]).to(out.dtype.element_ty), mask=mine[:, None])
    tl.store(lse + b * lse_b + h * lse_h + row, natural, mask=mine)


def forward(
    q: Tensor, k: Tensor, v: Tensor, words: Words, lists: list[Tensor], tile: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``[B, H, Q, Dv]`` in q's dtype and fp32 lse ``[B, H, Q]``, natural log.

    ``lists`` begin with the four by row of a layout of ``tile`` queries and keys, whole pieces; head dims
    are powers of two of up to 128.
    """
    batch, heads, q_len, _ = q.shape
    out = q.new_empty((batch, heads, q_len, v.shape[-1]))
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
    m, n, warps, stages = FORWARD
    dispatch(
        _forward, (ceil_div(q_len, m), batch * heads),
        q, k, v, out, lse, words.bits, *lists[:4], *strides_of(q, k, v, out), *lse.stride()[:2],
        *strides_of_words(words), *strides_of_lists(lists[:4]), *sizes_of(q, k, words),
        scale * LOG2_E, M=m, N=n, **constants_of(q, k, v, words, tile), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out, lse


def strides_of(*tensors: Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


def sizes_of(q: Tensor, k: Tensor, words: Words) -> list[int]:
    """Query heads, those of a KV head and of a list, queries and keys."""
    return [q.shape[1], q.shape[1] // k.shape[1], words.sharing, q.shape[2], k.shape[2]]


def constants_of(
    q: Tensor, k: Tensor, v: Tensor, words: Words, tile: tuple[int, int]
) -> dict[str, Any]:
    # Keys of [B, S, H, D] may lie further from the first than an int32 counts.
    far = any(x.shape[2] * x.stride(2) >= 2**31 for x in (k, v))
    of_tile = {"Q_TILE": tile[0], "KV_TILE": tile[1]}
    dims = {"D": q.shape[-1], "DV": v.shape[-1]}
    return of_tile | dims | {"FOLD": words.fold, "CAUSAL": words.causal, "FAR": far}


def strides_of_words(words: Words) -> list[int]:
    bits = words.bits
    return [*_shared(bits)[:2], bits.stride(2), bits.shape[2]]


def strides_of_lists(lists: list[Tensor]) -> list[int]:
    """Strides of counts, of partial and of full tiles."""
    num, some, _, full = lists
    of_some, of_full = ([*_shared(x)[:2], x.stride(2)] for x in (some, full))
    return [*_shared(num)[:2], *of_some, *of_full]


def _shared(x: Tensor) -> list[int]:
    """Strides, 0 along axes of one."""
    return [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
