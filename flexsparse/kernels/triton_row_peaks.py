"""`row_peaks` as one kernel: products of a tile on the tensor cores, their maxima in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

# What one program multiplies at once: queries and heads, by summaries.
_PAIRS = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
_COLUMNS = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
_FEWEST = 16
# The channels of a query or key, so that tiles fit into shared memory.
_MOST_BYTES = 512


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _row_peaks(
    q, low, high, worth, rows, columns, q_len, lists, scale,
    q_b, q_h, q_i, low_b, low_h, low_c, high_b, high_h, high_c,
    HAS_HIGH: tl.constexpr, WHOLE: tl.constexpr, Q_BLOCK: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    tiles = (columns + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    one = tl.program_id(1)
    b = (one // lists).to(tl.int64)
    first_head = one % lists * SHARE
    kv = first_head // GROUP
    d = tl.arange(0, D_PAD)

    # The pairs of a row lie side by side: queries, and the heads of each.
    PAIRS: tl.constexpr = QUERIES * HEADS
    m = tl.arange(0, ROWS * PAIRS)
    row = group * ROWS + m // PAIRS
    query = m % PAIRS // HEADS
    head = m % HEADS

    inside = (column < columns)[:, None] & (d < D)[None, :]
    line = b * low_b + kv.to(tl.int64) * low_h + column.to(tl.int64) * low_c
    low_tile = tl.load(low + line[:, None] + d[None, :], mask=inside, other=0)
    if HAS_HIGH:
        line = b * high_b + kv.to(tl.int64) * high_h + column.to(tl.int64) * high_c
        high_tile = tl.load(high + line[:, None] + d[None, :], mask=inside, other=0)
    if WHOLE:
        low_tile = low_tile.to(tl.float32)
        if HAS_HIGH:
            high_tile = high_tile.to(tl.float32)

    peak = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    for chunk in range(CHUNKS):
        nth = chunk * QUERIES + query
        i = row * Q_BLOCK + nth
        real = (nth < Q_BLOCK) & (head < SHARE) & (row < rows) & (i < q_len)
        asked = b * q_b + (first_head + head).to(tl.int64) * q_h + i.to(tl.int64) * q_i
        x = tl.load(q + asked[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0)
        if WHOLE:
            x = x.to(tl.float32)
        if HAS_HIGH:
            none = tl.zeros_like(x)
            product = tl.dot(
                tl.where(x < 0, none, x), tl.trans(high_tile), input_precision="tf32x3"
            )
            below = tl.where(x > 0, none, x)
            product = tl.dot(below, tl.trans(low_tile), product, input_precision="tf32x3")
        else:
            product = tl.dot(x, tl.trans(low_tile), input_precision="tf32x3")
        product = tl.where(real[:, None], product, float("-inf"))
        best = tl.reduce(tl.reshape(product, [ROWS, PAIRS, COLUMNS]), 1, _higher)
        peak = _higher(peak, best)

    r = group * ROWS + tl.arange(0, ROWS)
    out = (one.to(tl.int64) * rows + r)[:, None] * columns + column[None, :]
    tl.store(worth + out, peak * scale, mask=(r < rows)[:, None] & (column < columns)[None, :])


def suits(q: Tensor, low: Tensor) -> bool:
    size = q.element_size() if q.dtype == low.dtype else 4
    return q.dtype in _PAIRS and low.dtype in _PAIRS and q.shape[-1] * size <= _MOST_BYTES


def launch(
    q: Tensor, low: Tensor, high: Tensor | None, q_block: int, share: int, scale: float
) -> Tensor:
    batch, heads, q_len, dim = q.shape
    kv_heads, columns = low.shape[1:3]
    lists, rows = heads // share, ceil_div(q_len, q_block)
    other = low if high is None else high
    q, low, other = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, low, other))
    worth = torch.empty((batch, lists, rows, columns), dtype=torch.float32, device=q.device)
    whole = q.dtype != low.dtype or q.dtype == torch.float32
    kind = torch.float32 if whole else q.dtype
    most, side = _PAIRS[kind], min(_COLUMNS[kind], max(_FEWEST, next_power_of_two(columns)))
    shared = next_power_of_two(share)
    queries = min(next_power_of_two(min(q_block, q_len)), max(1, most // shared))
    pairs = queries * shared
    at_once = max(ceil_div(_FEWEST, pairs), min(most // pairs, next_power_of_two(rows)), 1)
    few = at_once * pairs == _FEWEST
    if few or dim * q.element_size() > _MOST_BYTES // 2:
        # Decoding: little to multiply, all the more programs read. Or many channels beside few columns.
        side = min(side, 64)
    grid = (ceil_div(rows, at_once) * ceil_div(columns, side), batch * lists)
    dispatch(
        _row_peaks, grid,
        q, low, other, worth, rows, columns, q_len, lists, scale, *q.stride()[:3],
        *low.stride()[:3], *other.stride()[:3],
        HAS_HIGH=high is not None, WHOLE=whole, Q_BLOCK=q_block, SHARE=share,
        GROUP=heads // kv_heads, ROWS=at_once, QUERIES=queries, HEADS=shared,
        CHUNKS=ceil_div(min(q_block, q_len), queries), COLUMNS=side, D=dim,
        D_PAD=max(16, next_power_of_two(dim)), num_warps=4 if few or whole else 8,
    )  # fmt: skip
    return worth
