"""Gradients of `triton_member`: a program of dQ holds some rows and walks their list; one of dK and dV holds some
keys and walks the list of their column, for every query head over its KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.kernels.triton_member import (
    LOG2_E,
    Pieces,
    Words,
    constants_of,
    counts_of,
    listed,
    seen_by_row,
    sizes_of,
    strides_of,
    strides_of_lists,
    strides_of_words,
    words_of,
)
from flexsparse.shapes import ceil_div

# As there.
BY_ROW = Pieces(64, 64, 4, 3)
BY_COLUMN = Pieces(64, 64, 4, 3)


@triton.jit
def _seen_by_key(
    words, first_row, key, width, row_words, kv_len,
    M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The same, ``[N, M]``."""
    word = (first_row // 8 + tl.arange(0, M // 8))[None, :]
    there = (word < row_words) & (key < kv_len)[:, None]
    byte = tl.load(words + word.to(tl.int64) * width + key[:, None], mask=there, other=0)
    byte = byte.to(tl.int32)
    if CAUSAL:
        # Told of eight rows at once: those before the key are shifted out.
        byte = byte & (255 << tl.minimum(tl.maximum(key[:, None] - word * 8, 0), 8))
    bit = byte[:, :, None] & (1 << tl.arange(0, 8))[None, None, :]
    return tl.reshape(bit, [N, M]) != 0


@triton.jit
def _by_row(
    q, k, v, out, do, lse, d_lse, bases, delta, dq, words, some, some_at, full, full_at,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_r, lse_b, lse_h, dq_b, dq_h, dq_r,
    word_b, word_h, width, row_words, num_b, num_h, idx_b, idx_h, idx_r, full_b, full_h, full_r,
    heads, group, sharing, q_len, kv_len, scale, raw_scale,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, FOLD: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
    THROUGH_LSE: tl.constexpr,
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
    at_out = b * o_b + h * o_h + row[:, None].to(tl.int64) * o_r + e[None, :]
    at_lse = b * lse_b + h * lse_h + row
    queries = tl.load(to_q, mask=mine[:, None], other=0.0)
    grads = tl.load(do + at_out, mask=mine[:, None], other=0.0)
    outs = tl.load(out + at_out, mask=mine[:, None], other=0.0)
    base = tl.load(lse + at_lse, mask=mine, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base * 1.4426950408889634)
    less = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    if THROUGH_LSE:
        less -= tl.load(d_lse + at_lse, mask=mine, other=0.0)
    # Each column reads these of its rows.
    tl.store(bases + at_lse, base, mask=mine)
    tl.store(delta + at_lse, less, mask=mine)
    own = words_of(words, b, h, heads, word_b, word_h, sharing, FOLD)
    to_k = k + b * k_b + h // group * k_h
    to_v = v + b * v_b + h // group * v_h
    at = first_row // Q_TILE
    at_num = b * num_b + h * num_h + at
    partial, number = counts_of(some + at_num, full + at_num)
    of_some = some_at + b * idx_b + h * idx_h + at * idx_r
    of_full = full_at + b * full_b + h * full_h + at * full_r
    STEPS: tl.constexpr = KV_TILE // N
    sums = tl.zeros([M, D], tl.float32)
    for step in range(number * STEPS):
        slot = step // STEPS
        column = listed(of_some, of_full, partial, slot)
        key = column * KV_TILE + step % STEPS * N + tl.arange(0, N)
        there = (key < kv_len)[:, None]
        place = (key.to(tl.int64) if FAR else key)[:, None]
        keys = tl.load(to_k + place * k_s + d[None, :], mask=there, other=0.0)
        values = tl.load(to_v + place * v_s + e[None, :], mask=there, other=0.0)
        seen = seen_by_row(own, first_row, row, key, width, row_words, kv_len, M, N, CAUSAL)
        scores = tl.dot(queries, tl.trans(keys))
        weight = tl.exp2(tl.where(seen, scores * scale - base[:, None], float("-inf")))
        d_weight = tl.dot(grads, tl.trans(values))
        # What an unseen key holds may be anything.
        d_raw = tl.where(seen, weight * (d_weight - less[:, None]), 0.0)
        sums = tl.dot(d_raw.to(keys.dtype), keys, sums)
    to_dq = dq + b * dq_b + h * dq_h + row[:, None].to(tl.int64) * dq_r + d[None, :]
    tl.store(to_dq, (sums * raw_scale).to(dq.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _by_column(
    q, k, v, do, bases, delta, dk, dv, words, some, some_at, full, full_at,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_r, lse_b, lse_h,
    dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    word_b, word_h, width, row_words, num_b, num_h, idx_b, idx_h, idx_c, full_b, full_h, full_c,
    heads, group, sharing, q_len, kv_len, scale, raw_scale,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, FOLD: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    first_key = tl.program_id(0) * N
    lane = tl.program_id(1).to(tl.int64)
    kv_heads = heads // group
    b = lane // kv_heads
    g = lane % kv_heads
    key = first_key + tl.arange(0, N)
    there = (key < kv_len)[:, None]
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    place = (key.to(tl.int64) if FAR else key)[:, None]
    keys = tl.load(k + b * k_b + g * k_h + place * k_s + d[None, :], mask=there, other=0.0)
    values = tl.load(v + b * v_b + g * v_h + place * v_s + e[None, :], mask=there, other=0.0)
    at = first_key // KV_TILE
    STEPS: tl.constexpr = Q_TILE // M
    d_keys = tl.zeros([N, D], tl.float32)
    d_values = tl.zeros([N, DV], tl.float32)
    for part in range(group):
        h = g * group + part
        own = words_of(words, b, h, heads, word_b, word_h, sharing, FOLD)
        to_q = q + b * q_b + h * q_h
        to_do = do + b * o_b + h * o_h
        at_lse = b * lse_b + h * lse_h
        at_num = b * num_b + h * num_h + at
        partial, number = counts_of(some + at_num, full + at_num)
        of_some = some_at + b * idx_b + h * idx_h + at * idx_c
        of_full = full_at + b * full_b + h * full_h + at * full_c
        for step in range(number * STEPS):
            slot = step // STEPS
            tile = listed(of_some, of_full, partial, slot)
            first_row = tile * Q_TILE + step % STEPS * M
            row = first_row + tl.arange(0, M)
            mine = row < q_len
            of_row = row[:, None].to(tl.int64)
            queries = tl.load(to_q + of_row * q_r + d[None, :], mask=mine[:, None], other=0.0)
            grads = tl.load(to_do + of_row * o_r + e[None, :], mask=mine[:, None], other=0.0)
            base = tl.load(bases + at_lse + row, mask=mine, other=0.0)
            less = tl.load(delta + at_lse + row, mask=mine, other=0.0)
            seen = _seen_by_key(own, first_row, key, width, row_words, kv_len, M, N, CAUSAL)
            scores = tl.dot(keys, tl.trans(queries))
            weight = tl.exp2(tl.where(seen, scores * scale - base[None, :], float("-inf")))
            d_values = tl.dot(weight.to(grads.dtype), grads, d_values)
            d_weight = tl.dot(values, tl.trans(grads))
            d_raw = tl.where(seen, weight * (d_weight - less[None, :]), 0.0)
            d_keys = tl.dot(d_raw.to(queries.dtype), queries, d_keys)
    to_dk = dk + b * dk_b + g * dk_h + place * dk_s + d[None, :]
    to_dv = dv + b * dv_b + g * dv_h + place * dv_s + e[None, :]
    tl.store(to_dk, (d_keys * raw_scale).to(dk.dtype.element_ty), mask=there)
    tl.store(to_dv, d_values.to(dv.dtype.element_ty), mask=there)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, do: Tensor, lse: Tensor, d_lse: Tensor | None,
    words: Words, lists: list[Tensor], tile: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of what `forward` gave, in the dtypes of q, k and v; nothing is added in an order that
    may change.

    ``do`` and ``d_lse`` are the gradients of out and lse, laid out as these are; ``lists`` all eight.
    """
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    bases, delta = torch.empty_like(lse), torch.empty_like(lse)
    strides = [*strides_of(q, k, v, out), *lse.stride()[:2]]
    sizes = [*sizes_of(q, k, words), scale * LOG2_E, scale]
    constants = constants_of(q, k, v, words, tile)
    m, n, warps, stages = BY_ROW
    dispatch(
        _by_row, (ceil_div(q.shape[2], m), q.shape[0] * q.shape[1]),
        q, k, v, out, do, lse, lse if d_lse is None else d_lse, bases, delta, dq, words.bits, *lists[:4],
        *strides, *strides_of(dq), *strides_of_words(words), *strides_of_lists(lists[:4]), *sizes, M=m, N=n,
        **constants, THROUGH_LSE=d_lse is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    m, n, warps, stages = BY_COLUMN
    dispatch(
        _by_column, (ceil_div(k.shape[2], n), k.shape[0] * k.shape[1]),
        q, k, v, do, bases, delta, dk, dv, words.bits, *lists[4:8], *strides, *strides_of(dk, dv),
        *strides_of_words(words), *strides_of_lists(lists[4:8]), *sizes, M=m, N=n, **constants, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv
