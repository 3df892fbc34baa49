"""`top_k` as one kernel: a search for the lowest value that is kept, bit by bit, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

# One row must fit into the registers of a program.
MOST = 2**15
_MOST_A_WARP = 1024
# Fewer leave room for more programs at once.
_NUMBERS_A_PROGRAM = 512
# Below it a program takes one row, so that all multiprocessors have some.
_FEW_ROWS = 4096


@triton.jit
def _top_k(
    score, reach, forced, count, chosen, rows, columns, row_count, heads, width, highest,
    score_b, score_h, score_r, score_c, reach_b, reach_h, reach_r, reach_c,
    forced_b, forced_h, forced_r, forced_c,
    HAS_REACH: tl.constexpr, HAS_FORCED: tl.constexpr, HAS_COUNT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    LEAST: tl.constexpr = -2147483648
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = row < rows
    r = row % row_count
    h = row // row_count % heads
    b = row // row_count // heads
    column = tl.arange(0, COLUMNS)[None, :]
    inside = real[:, None] & (column < columns)

    at = (b * score_b + h * score_h + r * score_r)[:, None] + column * score_c
    value = tl.load(score + at, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == float("inf"), highest, value)
    value = tl.where(value != value, -highest, value)
    # -0 equals 0.
    value = tl.where(value == 0, 0.0, value)
    there = value > float("-inf")
    bits = value.to(tl.int32, bitcast=True)
    # Integers in the order of the numbers.
    key = tl.where(bits < 0, bits ^ 2147483647, bits)
    if HAS_FORCED:
        at = (b * forced_b + h * forced_h + r * forced_r)[:, None] + column * forced_c
        first = tl.load(forced + at, mask=inside, other=0) != 0
        key = tl.where(first, 2147483647, key)
        there = there | first
    if HAS_REACH:
        at = (b * reach_b + h * reach_h + r * reach_r)[:, None] + column * reach_c
        there = there & (tl.load(reach + at, mask=inside, other=0) != 0)
    key = tl.where(there, key, LEAST)

    keep = tl.minimum(tl.sum(there.to(tl.int32), 1), width)
    if HAS_COUNT:
        keep = tl.minimum(keep, tl.load(count + row, mask=real, other=0).to(tl.int32))
        keep = tl.maximum(keep, 0)
    # The highest threshold that so many reach; found once they are neither more nor fewer.
    threshold = tl.full([ROWS], LEAST, tl.int32)
    reached = tl.full([ROWS], COLUMNS, tl.int32)
    bit = 31
    while (bit >= 0) & (tl.max((reached != keep).to(tl.int32), 0) > 0):
        step = tl.where(bit == 31, threshold ^ LEAST, threshold | (1 << bit))
        many = tl.sum((key >= step[:, None]).to(tl.int32), 1)
        taken = (many >= keep) & (reached != keep)
        threshold = tl.where(taken, step, threshold)
        reached = tl.where(taken, many, reached)
        bit -= 1

    above = key > threshold[:, None]
    equal = there & (key == threshold[:, None])
    left = keep - tl.sum(above.to(tl.int32), 1)
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= left[:, None]))
    place = tl.cumsum(kept.to(tl.int32), 1) - 1
    out = row[:, None] * width
    tl.store(chosen + out + place, column + tl.zeros_like(place), mask=kept)
    slot = tl.arange(0, SLOTS)[None, :]
    unused = real[:, None] & (slot >= keep[:, None]) & (slot < width)
    tl.store(chosen + out + slot, tl.full([ROWS, SLOTS], -1, tl.int32), mask=unused)


def launch(
    score: Tensor, width: int, reach: Tensor | None, forced: Tensor | None, count: Tensor | None
) -> Tensor:
    batch, heads, row_count, columns = score.shape
    total = batch * heads * row_count
    chosen = torch.empty((*score.shape[:3], width), dtype=torch.int32, device=score.device)
    if total == 0:
        return chosen
    padded = next_power_of_two(columns)
    warps = max(1, padded // _MOST_A_WARP)
    at_once = 1 if total <= _FEW_ROWS else max(1, min(32, _NUMBERS_A_PROGRAM // padded))
    reached, first = (score if x is None else x.expand(score.shape) for x in (reach, forced))
    counted = score if count is None else count.expand(score.shape[:3]).contiguous()
    dispatch(
        _top_k, (ceil_div(total, at_once),),
        score, reached, first, counted, chosen, total, columns, row_count, heads, width,
        torch.finfo(score.dtype).max, *score.stride(), *reached.stride(), *first.stride(),
        HAS_REACH=reach is not None, HAS_FORCED=forced is not None, HAS_COUNT=count is not None,
        ROWS=at_once, COLUMNS=padded, SLOTS=next_power_of_two(width),
        num_warps=min(32, warps),
    )  # fmt: skip
    return chosen
