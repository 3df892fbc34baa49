"""Attention over lists of blocks: queries read their blocks, and gradients of a block meet its readers.

A program of the forward, and of dQ, holds one query and the heads that share its list. A program of dK
and dV holds one block and walks the queries that listed it, a few at a time, so that what it adds is
added once for many of them. A block with many readers is walked by many programs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

# Readers that one program walks, and rows of queries and heads that it takes at once.
_READERS = 512
_ROWS = 64


@triton.jit
def _seen(seen, at, key, there, N: tl.constexpr, HAS_SEEN: tl.constexpr):
    """Which keys of a block a query sees: those that exist, and that its bits name."""
    if HAS_SEEN:
        byte = tl.load(seen + at * (N // 8) + key // 8, mask=there, other=0).to(tl.int32)
        there = there & (((byte >> (key % 8)) & 1) != 0)
    return there


@triton.jit
def _forward(
    q, k, v, chosen, seen, out, lse,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_r, lse_b, lse_h,
    rows, kept, kv_len, dim, v_dim, lists, group, sharing, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_SEEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = tl.program_id(2).to(tl.int64)
    b = line // lists
    own = line % lists
    g = own // sharing
    lane = tl.program_id(1) * M + tl.arange(0, M)
    mine = lane < group
    h = own * group + lane
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    key = tl.arange(0, N)
    in_d = d[None, :] < dim
    in_e = e[None, :] < v_dim

    at_q = q + b * q_b + row * q_r + h[:, None] * q_h + d[None, :]
    queries = tl.load(at_q, mask=mine[:, None] & in_d, other=0.0)
    listed = (line * rows + row) * kept
    to_k = k + b * k_b + g * k_h + d[None, :]
    to_v = v + b * v_b + g * v_h + e[None, :]
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, DV], tl.float32)
    for slot in range(kept):
        block = tl.load(chosen + listed + slot).to(tl.int64)
        at = block * N + key
        there = (block >= 0) & (at < kv_len)
        keys = tl.load(to_k + at[:, None] * k_s, mask=there[:, None] & in_d, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        visible = _seen(seen, listed + slot, key, there, N, HAS_SEEN)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        # A query that has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weight, 1)
        values = tl.load(to_v + at[:, None] * v_s, mask=visible[:, None] & in_e, other=0.0)
        part = tl.dot(weight.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * shrink[:, None] + part
        peak = new
    whole = tl.where(mass == 0.0, 1.0, mass)
    # Scores are in powers of two here, lse in natural logarithms.
    natural = tl.where(mass == 0.0, float("-inf"), (peak + tl.log2(whole)) * 0.6931471805599453)
    to_out = out + b * o_b + row * o_r + h[:, None] * o_h + e[None, :]
    result = (sums / whole[:, None]).to(out.dtype.element_ty)
    tl.store(to_out, result, mask=mine[:, None] & in_e)
    tl.store(lse + b * lse_b + h * lse_h + row, natural, mask=mine)


@triton.jit
def _backward_q(
    q, k, v, chosen, seen, out, do, lse, d_lse, delta, dq,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_r, lse_b, lse_h, dq_b, dq_h, dq_r,
    rows, kept, kv_len, dim, v_dim, lists, group, sharing, scale, raw_scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_SEEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = tl.program_id(2).to(tl.int64)
    b = line // lists
    own = line % lists
    g = own // sharing
    lane = tl.program_id(1) * M + tl.arange(0, M)
    mine = lane < group
    h = own * group + lane
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    key = tl.arange(0, N)
    in_d = d[None, :] < dim
    in_e = e[None, :] < v_dim

    at_q = q + b * q_b + row * q_r + h[:, None] * q_h + d[None, :]
    queries = tl.load(at_q, mask=mine[:, None] & in_d, other=0.0)
    at_do = do + b * o_b + row * o_r + h[:, None] * o_h + e[None, :]
    grads = tl.load(at_do, mask=mine[:, None] & in_e, other=0.0)
    base = tl.load(lse + b * lse_b + h * lse_h + row, mask=mine, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base * 1.4426950408889634)
    at_out = out + b * o_b + row * o_r + h[:, None] * o_h + e[None, :]
    outs = tl.load(at_out, mask=mine[:, None] & in_e, other=0.0)
    through = tl.load(d_lse + b * lse_b + h * lse_h + row, mask=mine, other=0.0)
    less = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1) - through
    tl.store(delta + b * lse_b + h * lse_h + row, less, mask=mine)
    listed = (line * rows + row) * kept
    to_k = k + b * k_b + g * k_h + d[None, :]
    to_v = v + b * v_b + g * v_h + e[None, :]
    sums = tl.zeros([M, D], tl.float32)
    for slot in range(kept):
        block = tl.load(chosen + listed + slot).to(tl.int64)
        at = block * N + key
        there = (block >= 0) & (at < kv_len)
        visible = _seen(seen, listed + slot, key, there, N, HAS_SEEN)
        keys = tl.load(to_k + at[:, None] * k_s, mask=visible[:, None] & in_d, other=0.0)
        values = tl.load(to_v + at[:, None] * v_s, mask=visible[:, None] & in_e, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        weight = tl.where(visible[None, :], tl.exp2(scores - base[:, None]), 0.0)
        d_weight = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        d_raw = (weight * (d_weight - less[:, None]) * raw_scale).to(queries.dtype)
        sums += tl.dot(d_raw, keys, input_precision=PRECISION)
    to_dq = dq + b * dq_b + row * dq_r + h[:, None] * dq_h + d[None, :]
    tl.store(to_dq, sums.to(dq.dtype.element_ty), mask=mine[:, None] & in_d)


@triton.jit
def _backward_kv(
    q, k, v, seen, do, lse, delta, dk, dv, readers, owner, begin, end,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_r, lse_b, lse_h,
    rows, kept, kv_heads, kv_len, dim, v_dim, lists, group, sharing, scale, raw_scale,
    T: tl.constexpr, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_SEEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(1).to(tl.int64)
    job = line * tl.num_programs(0) + tl.program_id(0)
    block = tl.load(owner + job).to(tl.int64)
    if block >= 0:
        b = line // lists
        own = line % lists
        g = own // sharing
        M: tl.constexpr = T * G
        lane = tl.arange(0, M)
        h = own * group + lane % G
        d = tl.arange(0, D)
        e = tl.arange(0, DV)
        key = tl.arange(0, N)
        at = block * N + key
        there = at < kv_len
        in_d = d[None, :] < dim
        in_e = e[None, :] < v_dim
        to_k = k + b * k_b + g * k_h + at[:, None] * k_s + d[None, :]
        to_v = v + b * v_b + g * v_h + at[:, None] * v_s + e[None, :]
        keys = tl.load(to_k, mask=there[:, None] & in_d, other=0.0)
        values = tl.load(to_v, mask=there[:, None] & in_e, other=0.0)
        d_keys = tl.zeros([N, D], tl.float32)
        d_values = tl.zeros([N, DV], tl.float32)
        first = tl.load(begin + job)
        last = tl.load(end + job)
        for start in range(first, last, T):
            entry = start + lane // G
            mine = (entry < last) & (lane % G < group)
            place = tl.load(readers + line * rows * kept + entry, mask=mine, other=0).to(tl.int64)
            row = place // kept
            at_q = q + b * q_b + row[:, None] * q_r + h[:, None] * q_h + d[None, :]
            queries = tl.load(at_q, mask=mine[:, None] & in_d, other=0.0)
            at_do = do + b * o_b + row[:, None] * o_r + h[:, None] * o_h + e[None, :]
            grads = tl.load(at_do, mask=mine[:, None] & in_e, other=0.0)
            base = tl.load(lse + b * lse_b + h * lse_h + row, mask=mine, other=0.0)
            base = tl.where(base == float("-inf"), 0.0, base * 1.4426950408889634)
            less = tl.load(delta + b * lse_b + h * lse_h + row, mask=mine, other=0.0)
            visible = there[:, None] & mine[None, :]
            if HAS_SEEN:
                spot = (line * rows * kept + place)[None, :] * (N // 8) + key[:, None] // 8
                byte = tl.load(seen + spot, mask=visible, other=0).to(tl.int32)
                visible = visible & (((byte >> (key[:, None] % 8)) & 1) != 0)
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale
            weight = tl.where(visible, tl.exp2(scores - base[None, :]), 0.0)
            d_values += tl.dot(weight.to(grads.dtype), grads, input_precision=PRECISION)
            d_weight = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
            # A key that nobody sees may hold anything.
            d_raw = tl.where(visible, weight * (d_weight - less[None, :]) * raw_scale, 0.0)
            d_raw = d_raw.to(queries.dtype)
            d_keys += tl.dot(d_raw, queries, input_precision=PRECISION)
        to_dk = dk + ((b * kv_heads + g) * kv_len + at[:, None]) * dim + d[None, :]
        to_dv = dv + ((b * kv_heads + g) * kv_len + at[:, None]) * v_dim + e[None, :]
        tl.atomic_add(to_dk, d_keys, mask=there[:, None] & in_d, sem="relaxed")
        tl.atomic_add(to_dv, d_values, mask=there[:, None] & in_e, sem="relaxed")


class Readers(NamedTuple):
    """Who reads each block: places ``row * K + slot`` ``[lines, R * K]`` ordered by the block there, and
    the jobs of dK and dV ``[lines, P]``: a block, or -1 for none, and the part of its readers."""

    places: Tensor
    owner: Tensor
    begin: Tensor
    end: Tensor


def readers(chosen: Tensor, blocks: int) -> Readers:
    """``chosen [B, L, R, K]``, of ``blocks`` in all. The device alone works, shapes are fixed."""
    listed = chosen.flatten(0, 1).flatten(1)
    block, places = torch.where(listed < 0, blocks, listed).sort(dim=1)
    each = torch.arange(blocks + 1, device=chosen.device, dtype=block.dtype)
    bounds = torch.searchsorted(block, each.expand(len(block), -1).contiguous())
    count = bounds.diff(dim=1)
    jobs = (count + _READERS - 1) // _READERS
    done = jobs.cumsum(1)
    job = torch.arange(blocks + ceil_div(listed.shape[1], _READERS), device=chosen.device)
    owner = torch.searchsorted(done, job.expand(len(done), -1).contiguous(), right=True)
    known = owner.clamp(max=blocks - 1)
    begin = bounds.gather(1, known) + (job - (done - jobs).gather(1, known)) * _READERS
    end = torch.minimum(begin + _READERS, bounds.gather(1, known + 1))
    owner = torch.where(owner < blocks, owner, -1)
    return Readers(*(x.to(torch.int32) for x in (places, owner, begin, end)))


def forward(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, seen: Tensor | None, block: int, out: Tensor,
    lse: Tensor, scale: float,
) -> None:  # fmt: skip
    """Fills ``out [B, Hq, Q, Dv]`` and fp32 ``lse [B, Hq, Q]``, natural log.

    ``chosen [B, L, Q, K]`` int32 are blocks of ``block`` keys, -1 for none, a list for each
    ``Hq / L`` heads; ``seen [B, L, Q, K, block / 8]`` uint8 are bits, key by key, None where all are.
    """
    grid, sizes = _by_query(q, v, chosen, block, seen)
    dispatch(
        _forward, grid,
        q, k, v, chosen, chosen if seen is None else seen, out, lse,
        *_strides(q, k, v), *out.stride()[:3], *lse.stride()[:2],
        *_lengths(q, k, v, chosen), scale * math.log2(math.e), **sizes,
    )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, seen: Tensor | None, block: int, out: Tensor,
    do: Tensor, lse: Tensor, d_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, scale: float,
) -> None:  # fmt: skip
    """Fills ``dq`` and adds to fp32 ``dk [B, Hkv, S, D]`` and ``dv``, once for each job of a block.

    ``do`` and ``d_lse`` are the gradients of out and lse, laid out as these are.
    """
    grid, sizes = _by_query(q, v, chosen, block, seen)
    given = chosen if seen is None else seen
    delta = torch.empty_like(lse)
    scales = (scale * math.log2(math.e), scale)
    dispatch(
        _backward_q, grid,
        q, k, v, chosen, given, out, do, lse, d_lse, delta, dq, *_strides(q, k, v), *do.stride()[:3],
        *lse.stride()[:2], *dq.stride()[:3], *_lengths(q, k, v, chosen), *scales, **sizes,
    )  # fmt: skip
    _, kept, kv_len, *rest = _lengths(q, k, v, chosen)
    jobs = readers(chosen, ceil_div(kv_len, block))
    group = next_power_of_two(rest[3])
    del sizes["M"]
    dispatch(
        _backward_kv, (jobs.owner.shape[1], len(jobs.owner)),
        q, k, v, given, do, lse, delta, dk, dv, *jobs, *_strides(q, k, v), *do.stride()[:3],
        *lse.stride()[:2], q.shape[2], kept, k.shape[1], kv_len, *rest, *scales,
        T=max(1, _ROWS // group), G=max(group, 1), **sizes,
    )  # fmt: skip


def _strides(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    return [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]


def _lengths(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> list[int]:
    """Rows, candidates, keys, head dims, lists a sequence, query heads a list, lists a KV head."""
    lists = chosen.shape[1]
    dims = (q.shape[-1], v.shape[-1])
    shared = (q.shape[1] // lists, lists // k.shape[1])
    return [chosen.shape[2], chosen.shape[3], k.shape[2], *dims, lists, *shared]


def _by_query(
    q: Tensor, v: Tensor, chosen: Tensor, block: int, seen: Tensor | None
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The grid of a program a query and list, and what it holds."""
    batch, lists, rows, _ = chosen.shape
    group = q.shape[1] // lists
    m = min(max(16, next_power_of_two(group)), 64)
    return (rows, ceil_div(group, m), batch * lists), {
        "M": m, "N": block,
        "D": max(16, next_power_of_two(q.shape[-1])), "DV": max(16, next_power_of_two(v.shape[-1])),
        "HAS_SEEN": seen is not None, "PRECISION": "ieee" if q.element_size() > 2 else "tf32",
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip
