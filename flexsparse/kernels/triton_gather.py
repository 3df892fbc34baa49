"""Attention over lists of keys: a program a query and KV head, whose query heads share each key it reads."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import next_power_of_two


@triton.jit
def _forward(
    q, k, v, keys, out, lse,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, l_b, l_h, l_r, o_b, o_h, o_r, lse_b, lse_h,
    first, width, dim, v_dim, lists, group, sharing, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = (first + n).to(tl.int64)
    line = tl.program_id(2)
    b = (line // lists).to(tl.int64)
    own = line % lists
    g = (own // sharing).to(tl.int64)
    lane = tl.program_id(1) * M + tl.arange(0, M)
    mine = lane < group
    h = (own * group + lane).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    slot = tl.arange(0, N)

    at_q = q + b * q_b + row * q_r + h[:, None] * q_h + d[None, :]
    queries = tl.load(at_q, mask=mine[:, None] & (d[None, :] < dim), other=0.0)
    listed = keys + b * l_b + own.to(tl.int64) * l_h + n.to(tl.int64) * l_r
    to_k = k + b * k_b + g * k_h + d[None, :]
    to_v = v + b * v_b + g * v_h + e[None, :]
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, DV], tl.float32)
    for start in range(0, width, N):
        key = tl.load(listed + start + slot, mask=start + slot < width, other=-1)
        seen = key >= 0
        at = key.to(tl.int64)[:, None]
        chosen = tl.load(to_k + at * k_s, mask=seen[:, None] & (d[None, :] < dim), other=0.0)
        scores = tl.dot(queries, tl.trans(chosen), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        # A query that has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weight, 1)
        values = tl.load(to_v + at * v_s, mask=seen[:, None] & (e[None, :] < v_dim), other=0.0)
        part = tl.dot(weight.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * shrink[:, None] + part
        peak = new
    whole = tl.where(mass == 0.0, 1.0, mass)
    sums = sums / whole[:, None]
    # Scores are in powers of two here, lse in natural logarithms.
    natural = tl.where(mass == 0.0, float("-inf"), (peak + tl.log2(whole)) * 0.6931471805599453)
    to_out = out + b * o_b + row * o_r + h[:, None] * o_h + e[None, :]
    tl.store(to_out, sums.to(out.dtype.element_ty), mask=mine[:, None] & (e[None, :] < v_dim))
    tl.store(lse + b * lse_b + h * lse_h + row, natural, mask=mine)


@triton.jit
def _backward(
    q, k, v, keys, do, lse, delta, dq, dk, dv,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, l_b, l_h, l_r, o_b, o_h, o_r, lse_b, lse_h,
    dq_b, dq_h, dq_r, kv_heads, kv_len,
    first, width, dim, v_dim, lists, group, sharing, scale, raw_scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = (first + n).to(tl.int64)
    line = tl.program_id(2)
    b = (line // lists).to(tl.int64)
    own = line % lists
    g = (own // sharing).to(tl.int64)
    lane = tl.program_id(1) * M + tl.arange(0, M)
    mine = lane < group
    h = (own * group + lane).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    slot = tl.arange(0, N)

    at_q = q + b * q_b + row * q_r + h[:, None] * q_h + d[None, :]
    queries = tl.load(at_q, mask=mine[:, None] & (d[None, :] < dim), other=0.0)
    at_do = do + b * o_b + row * o_r + h[:, None] * o_h + e[None, :]
    grads = tl.load(at_do, mask=mine[:, None] & (e[None, :] < v_dim), other=0.0)
    base = tl.load(lse + b * lse_b + h * lse_h + row, mask=mine, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base * 1.4426950408889634)
    less = tl.load(delta + b * lse_b + h * lse_h + row, mask=mine, other=0.0)
    listed = keys + b * l_b + own.to(tl.int64) * l_h + n.to(tl.int64) * l_r
    to_k = k + b * k_b + g * k_h + d[None, :]
    to_v = v + b * v_b + g * v_h + e[None, :]
    to_dk = dk + (b * kv_heads + g) * kv_len * dim + d[None, :]
    to_dv = dv + (b * kv_heads + g) * kv_len * v_dim + e[None, :]
    sums = tl.zeros([M, D], tl.float32)
    for start in range(0, width, N):
        key = tl.load(listed + start + slot, mask=start + slot < width, other=-1)
        seen = key >= 0
        at = key.to(tl.int64)[:, None]
        in_k = seen[:, None] & (d[None, :] < dim)
        in_v = seen[:, None] & (e[None, :] < v_dim)
        chosen = tl.load(to_k + at * k_s, mask=in_k, other=0.0)
        values = tl.load(to_v + at * v_s, mask=in_v, other=0.0)
        scores = tl.dot(queries, tl.trans(chosen), input_precision=PRECISION) * scale
        weight = tl.where(seen[None, :] & mine[:, None], tl.exp2(scores - base[:, None]), 0.0)
        d_weight = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        d_raw = (weight * (d_weight - less[:, None]) * raw_scale).to(queries.dtype)
        d_values = tl.dot(tl.trans(weight.to(grads.dtype)), grads, input_precision=PRECISION)
        tl.atomic_add(to_dv + at * v_dim, d_values, mask=in_v, sem="relaxed")
        d_keys = tl.dot(tl.trans(d_raw), queries, input_precision=PRECISION)
        tl.atomic_add(to_dk + at * dim, d_keys, mask=in_k, sem="relaxed")
        sums += tl.dot(d_raw, chosen, input_precision=PRECISION)
    to_dq = dq + b * dq_b + row * dq_r + h[:, None] * dq_h + d[None, :]
    tl.store(to_dq, sums.to(dq.dtype.element_ty), mask=mine[:, None] & (d[None, :] < dim))


def forward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, first: int, out: Tensor, lse: Tensor, scale: float
) -> None:  # fmt: skip
    """Fills queries ``first …`` of ``out [B, Hq, Q, Dv]`` and fp32 ``lse [B, Hq, Q]``, natural log.

    ``keys [B or 1, 1 | Hkv | Hq, n, w]`` int32 are the lists of those queries; -1 is no key, and is
    not read.
    """
    grid, sizes = _sizes(q, k, v, keys, grads=False)
    dispatch(
        _forward, grid,
        q, k, v, keys, out, lse, *_strides(q, k, v, keys), *out.stride()[:3], *lse.stride()[:2],
        first, keys.shape[-1], q.shape[-1], v.shape[-1], *_sharing(q, k, keys),
        scale * math.log2(math.e), **sizes,
    )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, first: int, do: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float,
) -> None:  # fmt: skip
    """Fills queries ``first …`` of ``dq``, and adds to ``dk [B, Hkv, S, D]`` and ``dv``, fp32, by atomics.

    ``delta [B, Hq, Q]``: the sum of do times out, less the gradient of lse.
    """
    grid, sizes = _sizes(q, k, v, keys, grads=True)
    dispatch(
        _backward, grid,
        q, k, v, keys, do, lse, delta, dq, dk, dv, *_strides(q, k, v, keys), *do.stride()[:3],
        *lse.stride()[:2], *dq.stride()[:3], k.shape[1], k.shape[2],
        first, keys.shape[-1], q.shape[-1], v.shape[-1], *_sharing(q, k, keys),
        scale * math.log2(math.e), scale, **sizes,
    )  # fmt: skip


def _sharing(q: Tensor, k: Tensor, keys: Tensor) -> tuple[int, int, int]:
    """Lists a sequence, query heads a list, lists a KV head."""
    lists = max(keys.shape[1], k.shape[1])
    return lists, q.shape[1] // lists, lists // k.shape[1]


def _strides(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> list[int]:
    shared = [0 if keys.shape[i] == 1 else keys.stride(i) for i in (0, 1)]
    return [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *shared, keys.stride(2)]


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, grads: bool
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The grid, and the tile of query heads and keys that a program holds."""
    lists, group, _ = _sharing(q, k, keys)
    dims = [max(16, next_power_of_two(n)) for n in (q.shape[-1], v.shape[-1])]
    m, n, warps, stages = _tile(group, max(dims), q.element_size(), grads)
    grid = (keys.shape[2], -(-group // m), q.shape[0] * lists)
    return grid, {
        "M": m, "N": n, "D": dims[0], "DV": dims[1],
        "PRECISION": "ieee" if q.element_size() > 2 else "tf32",
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _tile(group: int, dim: int, itemsize: int, grads: bool) -> tuple[int, int, int, int]:
    """Query heads, keys, warps and stages that fit into registers and shared memory."""
    if itemsize > 2 or dim > 128:
        m = min(max(16, next_power_of_two(group)), 32)
        return (m, 16, 4, 1) if grads else (m, 32, 4, 2)
    m = min(max(16, next_power_of_two(group)), 128)
    return m, 32 if m < 64 else 64, 8 if m > 64 else 4, 2 if grads else 3
