"""`column_tiles` as one kernel: a program some columns of a word, walking down the rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.columns import Room, buffers
from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

# Of one word, so that many programs share the walk.
_COLUMNS = 4
_WARPS = 1


@triton.jit
def _columns(
    bits, counts, idx, rows, columns, lanes, partial, full, first_full, slots,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start_column = tl.program_id(0) * COLUMNS
    w = start_column // 32
    lane = tl.program_id(1).to(tl.int64)
    plane = tl.program_id(2)
    in_row = (columns + 31) // 32
    column = start_column + tl.arange(0, COLUMNS)
    place = column % 32
    exists = column < columns
    out = (plane * lanes + lane) * columns + column
    room = tl.where(plane == 0, partial, full)
    line = idx + (lane * columns + column) * slots + tl.where(plane == 0, 0, first_full)
    count = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        at = ((plane * lanes + lane) * rows + row) * in_row + w
        word = tl.load(bits + at, mask=row < rows, other=0)
        listed = (word[:, None] >> place[None, :]) & 1
        slot = count[None, :] + tl.cumsum(listed, 0) - listed
        value = row[:, None] + tl.zeros([ROWS, COLUMNS], tl.int32)
        tl.store(line[None, :] + slot, value, mask=(listed != 0) & (slot < room) & exists[None, :])
        count += tl.sum(listed, 0)
    degree = ((2 + plane) * lanes + lane) * columns + column
    tl.store(counts + out, tl.minimum(count, room), mask=exists)
    tl.store(counts + degree, count, mask=exists)
    for start in range(0, room, SLOTS):
        slot = start + tl.arange(0, SLOTS)[None, :]
        unused = (slot >= count[:, None]) & (slot < room) & exists[:, None]
        tl.store(line[:, None] + slot, 0, mask=unused)


def launch(bits: Tensor, columns: int, room: Room) -> tuple[Tensor, Tensor]:
    _, batch, heads, rows, _ = bits.shape
    counts, slots = buffers(bits, columns, room)
    dispatch(
        _columns, (ceil_div(columns, _COLUMNS), batch * heads, 2),
        bits, counts, slots, rows, columns, batch * heads, *room, room.first_full, room.slots,
        ROWS=max(16, min(128, next_power_of_two(rows))),
        SLOTS=min(64, next_power_of_two(max(room))), COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return counts, slots
