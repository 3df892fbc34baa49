"""`cut_lists` as one kernel: a program a slot, and one for the counts of some lists that stay whole.

Where pieces stand follows from the lengths of all lists before: each program adds them up for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.cut import Laid, buffers
from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

# Lists whose lengths are read at once, entries and places that are written at once.
_MOST_LISTS = 1024
_ENTRIES = 128
_WARPS = 2


@triton.jit
def _run(
    indices, counts, found, line, wide, first, last, of, width, ENTRIES: tl.constexpr
):  # fmt: skip
    """Entries ``first`` to ``last`` of a list, as a list; 0 behind them."""
    count = last - first
    tl.store(counts + of, count)
    for start in range(0, width, ENTRIES):
        step = start + tl.arange(0, ENTRIES)
        value = tl.load(indices + line * wide + first + step, mask=step < count, other=0)
        tl.store(found + of * width + step, value, mask=step < width)


@triton.jit
def _cut(
    partial_num, partial_idx, full_num, full_idx, whole, of_slots, found, place,
    rows, slots, lanes, longest, partial_wide, full_wide, width, size, length, chunks,
    BUT_LAST: tl.constexpr, LISTS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    slot = program - chunks
    owner, begin, base = 0, 0, 0
    for chunk in range(chunks):
        row = chunk * LISTS + tl.arange(0, LISTS)
        inside = row < rows
        at = lane * rows + row
        some = tl.load(partial_num + at, mask=inside, other=0)
        full = tl.load(full_num + at, mask=inside, other=0)
        number = some + full
        want = tl.where(number > longest, (number + longest - 1) // longest, 0)
        if BUT_LAST:
            want = tl.where(row == rows - 1, 0, want)
        ends = base + tl.cumsum(want, 0)
        if chunk == program:
            cut = (want > 0) & (ends <= slots)
            tl.store(whole + at, tl.where(cut, 0, some), mask=inside)
            tl.store(whole + lanes * rows + at, tl.where(cut, 0, full), mask=inside)
        passed = inside & (ends <= slot)
        owner += tl.sum(passed.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(passed, ends, 0), 0))
        base += tl.sum(want, 0)
    if slot >= 0:
        line = lane * rows + tl.minimum(owner, rows - 1)
        some = tl.load(partial_num + line)
        number = some + tl.load(full_num + line)
        pieces = tl.maximum(1, (number + longest - 1) // longest)
        used = (owner < rows) & (begin + pieces <= slots)
        piece = slot - begin
        share = (number + pieces - 1) // pieces
        first = tl.where(used, tl.minimum(piece * share, number), 0)
        last = tl.where(used, tl.minimum((piece + 1) * share, number), 0)
        of, all_slots = lane * slots + slot, lanes * slots
        _run(
            partial_idx, of_slots, found, line, partial_wide,
            tl.minimum(first, some), tl.minimum(last, some), of, width, ENTRIES,
        )  # fmt: skip
        _run(
            full_idx, of_slots + all_slots, found + all_slots * width, line, full_wide,
            tl.maximum(first - some, 0), tl.maximum(last - some, 0), of, width, ENTRIES,
        )  # fmt: skip
        held = tl.where(used, owner, 0)
        tl.store(of_slots + 2 * all_slots + of, held)
        tl.store(of_slots + 3 * all_slots + of, tl.where(used & (piece == 0), pieces, 0))
        for start in range(0, size, ENTRIES):
            step = start + tl.arange(0, ENTRIES)
            there = tl.minimum(held * size + step, length - 1)
            tl.store(place + of * size + step, there, mask=step < size)


def launch(
    lists: Sequence[Tensor], longest: int, slots: int, laid: Laid, *, but_last: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    partial_num, partial_idx, full_num, full_idx = (x.contiguous() for x in lists)
    made = buffers(lists, longest, slots, laid)
    batch, heads, rows = partial_num.shape
    at_once = max(16, min(_MOST_LISTS, next_power_of_two(rows)))
    chunks = ceil_div(rows, at_once)
    dispatch(
        _cut, (chunks + slots, batch * heads),
        partial_num, partial_idx, full_num, full_idx, *made,
        rows, slots, batch * heads, longest, partial_idx.shape[-1], full_idx.shape[-1],
        made[2].shape[-1], laid.size, laid.length, chunks,
        BUT_LAST=but_last, LISTS=at_once, ENTRIES=_ENTRIES, num_warps=_WARPS,
    )  # fmt: skip
    return made
