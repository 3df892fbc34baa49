"""The split walk as two kernels: one walks the parts of all lists, one joins them in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.backends.split_walk import Lanes, lanes_of, splits_for, steps_of
from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import next_power_of_two

# Bytes of K and V that a multiprocessor holds in flight, and of one step where the tile leaves a choice.
_IN_FLIGHT = 2**17
_STEP_BYTES = 2**15
_MOST_STAGES = 4


@triton.jit
def _slots(step, TILE: tl.constexpr, KEYS: tl.constexpr):
    """Where in a walk the keys of a step stand: one place, or one each where tiles are smaller."""
    if KEYS <= TILE:
        return step // (TILE // KEYS)
    else:
        return step * (KEYS // TILE) + tl.arange(0, KEYS) // TILE


@triton.jit
def _listed(some_at, full_at, slot, masked, total):
    """The tiles at places of the walk: through the partial list, then the full one."""
    tile = tl.load(some_at + slot, mask=slot < masked, other=0)
    rest = (slot >= masked) & (slot < total)
    return tile + tl.load(full_at + slot - masked, mask=rest, other=0)


@triton.jit(do_not_specialize=["splits"])
def _walk(
    q, k, v, some, some_at, full, full_at, mask, out, lse,
    scale, splits, rows, q_len, kv_len, lane_heads,
    some_b, some_h, some_at_b, some_at_h, full_b, full_h, full_at_b, full_at_h,
    q_b, q_h, q_i, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    mask_b, mask_h, mask_w, mask_g, mask_i,
    GROUP: tl.constexpr, SHARING: tl.constexpr, ALONE: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    split = part % splits
    lane = part // splits
    b = (lane // lane_heads).to(tl.int64)
    lane_h = lane % lane_heads
    h = (lane_h // SHARING).to(tl.int64)

    row = tl.arange(0, ROWS)
    exists = row < rows
    g, i = row // q_len, row % q_len
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    n = tl.arange(0, KEYS)
    in_d = d < D
    in_dv = dv < DV
    q_at = q + b * q_b + (lane_h * GROUP + g)[:, None] * q_h + i[:, None] * q_i + d[None, :] * q_d
    queries = tl.load(q_at, mask=exists[:, None] & in_d[None, :], other=0.0)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    if HAS_MASK:
        mask += b * mask_b + lane_h.to(tl.int64) * mask_h
        mask_row = g * mask_g + i * mask_i

    masked = tl.load(some + b * some_b + lane_h * some_h)
    total = masked + tl.load(full + b * full_b + lane_h * full_h)
    some_at += b * some_at_b + lane_h * some_at_h
    full_at += b * full_at_b + lane_h * full_at_h
    # Equal shares of what this lane lists, whatever there is room for.
    steps = tl.cdiv(total * TILE, KEYS)
    share = tl.cdiv(steps, splits)
    first = split * share

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    last = tl.minimum(first + share, steps)
    tile = _listed(some_at, full_at, _slots(first, TILE, KEYS), masked, total)
    for step in range(first, last):
        # Asked for a step ahead, so that what is read of K and V never waits for where it stands.
        ahead = _listed(some_at, full_at, _slots(step + 1, TILE, KEYS), masked, total)
        slot = _slots(step, TILE, KEYS)
        if KEYS <= TILE:
            within = step % (TILE // KEYS) * KEYS + n
            start = tile.to(tl.int64) * TILE + step % (TILE // KEYS) * KEYS
            k_at = k + start * k_n + n[:, None] * k_n + d[None, :] * k_d
            v_at = v + start * v_n + n[:, None] * v_n + dv[None, :] * v_d
            live = n < kv_len - start
        else:
            within = n % TILE
            key = tile.to(tl.int64) * TILE + within
            k_at = k + key[:, None] * k_n + d[None, :] * k_d
            v_at = v + key[:, None] * v_n + dv[None, :] * v_d
            live = (slot < total) & (key < kv_len)
        tile = ahead

        if EVEN and D == D_PAD:
            keys = tl.load(k_at)
        elif EVEN:
            keys = tl.load(k_at, mask=in_d[None, :], other=0.0)
        else:
            keys = tl.load(k_at, mask=live[:, None] & in_d[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = live[None, :]
        if HAS_MASK:
            asks = within < tl.where(slot < masked, TILE, 0)
            says = tl.load(
                mask + mask_row[:, None] + (slot * mask_w + within)[None, :],
                mask=asks[None, :] & exists[:, None],
                other=1,
            )
            seen = seen & (says != 0)
        if HAS_MASK or not EVEN:
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        # Who has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        peak = new
        mass = mass * shrink + tl.sum(weight, 1)
        if EVEN and DV == DV_PAD:
            values = tl.load(v_at)
        elif EVEN:
            values = tl.load(v_at, mask=in_dv[None, :], other=0.0)
        else:
            values = tl.load(v_at, mask=live[:, None] & in_dv[None, :], other=0.0)
        acc = tl.dot(
            weight.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION
        )

    found = mass > 0
    divisor = tl.where(found, mass, 1.0)
    acc = acc / divisor[:, None]
    height = tl.where(found, peak + tl.log2(divisor), float("-inf"))
    at = part.to(tl.int64) * rows + row
    if ALONE:
        # Sums of powers of two as natural logarithms.
        tl.store(lse + at, height * 0.6931471805599453, mask=exists)
    else:
        tl.store(lse + at, height, mask=exists)
        # What a part without weight would hold is not read.
        exists = exists & found
    tl.store(
        out + at[:, None] * DV + dv[None, :],
        acc.to(out.dtype.element_ty),
        mask=exists[:, None] & in_dv[None, :],
    )


@triton.jit(do_not_specialize=["splits"])
def _join(
    parts, heights, out, lse, splits, rows,
    WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    first = at // rows * splits * rows + at % rows
    split = tl.arange(0, WIDTH)
    height = tl.load(heights + first + split * rows, mask=split < splits, other=float("-inf"))
    peak = tl.max(height, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(height - base), 0)
    dv = tl.arange(0, DV_PAD)
    acc = tl.zeros([DV_PAD], tl.float32)
    for start in range(0, WIDTH, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        some = tl.load(heights + first + s * rows, mask=s < splits, other=float("-inf"))
        weight = tl.exp2(some - base)
        part = tl.load(
            parts + (first + s * rows)[:, None] * DV + dv[None, :],
            mask=(some > float("-inf"))[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        acc += tl.sum(weight[:, None] * part, 0)
    divisor = tl.where(total == 0, 1.0, total)
    acc = acc / divisor
    tl.store(out + at * DV + dv, acc.to(out.dtype.element_ty), mask=dv < DV)
    natural = (base + tl.log2(divisor)) * 0.6931471805599453
    tl.store(lse + at, tl.where(total == 0, float("-inf"), natural))


class Shape(NamedTuple):
    """How the walk is laid on the device: parts of a lane, keys a step, warps, steps in flight."""

    splits: int
    keys: int
    num_warps: int
    num_stages: int


def shape_for(q: Tensor, v: Tensor, lanes: Lanes, kv_tile: int, capacity: int) -> Shape:
    """By shapes alone, so that a graph may be replayed on other lists."""
    head_dim = next_power_of_two(max(16, q.shape[-1]))
    key_bytes = (head_dim + next_power_of_two(max(16, v.shape[-1]))) * q.element_size()
    # Small tiles are taken several at once, large ones in parts.
    fitting = _STEP_BYTES // key_bytes
    # The greatest power of two among them: a range of a kernel has no other length.
    keys = max(16, min(128, 1 << (fitting.bit_length() - 1)))
    stages = max(1, min(_MOST_STAGES, _IN_FLIGHT // (keys * key_bytes)))
    splits = splits_for(lanes.number, steps_of(capacity, kv_tile, keys), q.device)
    return Shape(splits, keys, 8 if lanes.group * q.shape[2] > 64 else 4, stages)


def launch(
    q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], mask: Tensor | None, kv_tile: int,
    capacity: int, scale: float, shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    some, some_at, full, full_at = lists
    lanes = lanes_of(q, k, some)
    splits, keys, num_warps, num_stages = shape or shape_for(q, v, lanes, kv_tile, capacity)
    rows, width_v = lanes.group * q.shape[2], v.shape[-1]
    out = q.new_empty((*q.shape[:3], width_v))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    parts, heights = out, lse
    if splits > 1:
        parts = q.new_empty((lanes.number, splits, rows, width_v), dtype=torch.float32)
        heights = q.new_empty((lanes.number, splits, rows), dtype=torch.float32)
    asks = some if mask is None else mask.view(torch.int8)
    pads = [max(16, next_power_of_two(n)) for n in (q.shape[-1], width_v)]
    dispatch(
        _walk, (lanes.number * splits,),
        q, k, v, some, some_at, full, full_at, asks, parts, heights,
        scale * math.log2(math.e), splits, rows, q.shape[2], k.shape[2], lanes.heads,
        *(step for x in lists for step in _steps(x, 2)), *q.stride(), *k.stride(), *v.stride(),
        *(_steps(asks, 5) if mask is not None else (0,) * 5),
        GROUP=lanes.group, SHARING=lanes.sharing, ALONE=splits == 1, TILE=kv_tile, KEYS=keys,
        ROWS=max(16, next_power_of_two(rows)), D=q.shape[-1], D_PAD=pads[0], DV=width_v,
        DV_PAD=pads[1], HAS_MASK=mask is not None,
        EVEN=k.shape[2] % kv_tile == 0 and keys <= kv_tile,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        dispatch(
            _join, (lanes.number * rows,),
            parts, heights, out, lse, splits, rows, WIDTH=next_power_of_two(splits),
            AT_ONCE=min(32, next_power_of_two(splits)), DV=width_v, DV_PAD=pads[1],
            num_warps=4,
        )  # fmt: skip
    return out, lse


def _steps(x: Tensor, axes: int) -> list[int]:
    """Strides of the first axes, 0 where all share one entry."""
    return [x.stride(i) if x.shape[i] > 1 else 0 for i in range(axes)]
