"""`tile_lists` as one kernel: a program a row or column, walking along it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import next_power_of_two


@triton.jit
def _tile_lists(
    codes, partial_num, partial_idx, full_num, full_idx,
    down_partial_num, down_partial_idx, down_full_num, down_full_idx, unsettled,
    lists, heads, rows, columns, stride_b, stride_h, stride_r, stride_c,
    partial_room, full_room, down_partial_room, down_full_room,
    TELLS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    across = lists * rows
    if line < across:
        _walk(
            codes, line, heads, rows, columns, stride_b, stride_h, stride_r, stride_c,
            partial_num, partial_idx, full_num, full_idx, partial_room, full_room,
            unsettled, TELLS, WIDTH,
        )  # fmt: skip
    else:
        _walk(
            codes, line - across, heads, columns, rows, stride_b, stride_h, stride_c, stride_r,
            down_partial_num, down_partial_idx, down_full_num, down_full_idx,
            down_partial_room, down_full_room, unsettled, False, WIDTH,
        )  # fmt: skip


@triton.jit
def _walk(
    codes, line, heads, lines, cells, stride_b, stride_h, stride_line, stride_cell,
    partial_num, partial_idx, full_num, full_idx, partial_room, full_room,
    unsettled, TELLS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The lists of one of ``lines``, which has so many ``cells``."""
    entry = line // lines
    start_of = codes + entry // heads * stride_b + entry % heads * stride_h
    start_of += line % lines * stride_line
    partial_into = partial_idx + line * partial_room
    full_into = full_idx + line * full_room
    lane = tl.arange(0, WIDTH)
    partial = tl.zeros([], tl.int32)
    full = tl.zeros([], tl.int32)
    most = tl.zeros([WIDTH], tl.int8)
    for start in range(0, cells, WIDTH):
        cell = start + lane
        code = tl.load(start_of + cell.to(tl.int64) * stride_cell, mask=cell < cells, other=0)
        if TELLS:
            most = tl.maximum(most, code)
        is_partial = (code == 1).to(tl.int32)
        is_full = (code == 2).to(tl.int32)
        slot = partial + tl.cumsum(is_partial, 0) - 1
        tl.store(partial_into + slot, cell, mask=(code == 1) & (slot < partial_room))
        slot = full + tl.cumsum(is_full, 0) - 1
        tl.store(full_into + slot, cell, mask=(code == 2) & (slot < full_room))
        partial += tl.sum(is_partial, 0)
        full += tl.sum(is_full, 0)
    if TELLS:
        tl.store(unsettled, 1, mask=tl.max(most, 0) > 2)
    tl.store(partial_num + line, tl.minimum(partial, partial_room))
    tl.store(full_num + line, tl.minimum(full, full_room))
    for start in range(0, partial_room, WIDTH):
        slot = start + lane
        tl.store(partial_into + slot, 0, mask=(slot >= partial) & (slot < partial_room))
    for start in range(0, full_room, WIDTH):
        slot = start + lane
        tl.store(full_into + slot, 0, mask=(slot >= full) & (slot < full_room))


def launch(
    codes: Tensor,
    across: tuple[int, int],
    down: tuple[int, int] | None,
    unsettled: Tensor | None = None,
) -> list[Tensor]:
    """``unsettled`` may be the host's, where it is pinned: it is written only where it becomes 1."""
    batch, heads, rows, columns = codes.shape
    made = _buffers(codes, rows, across)
    below = made
    lines, width = rows, columns
    if down is not None:
        below = _buffers(codes, columns, down)
        lines, width = rows + columns, max(rows, columns)
    width = max(32, min(1024, next_power_of_two(width)))
    dispatch(
        _tile_lists, (batch * heads * lines,),
        codes, *made, *below, made[0] if unsettled is None else unsettled,
        batch * heads, heads, rows, columns, *codes.stride(), *across, *(down or across),
        TELLS=unsettled is not None, WIDTH=width, num_warps=max(1, width // 256),
    )  # fmt: skip
    return made if down is None else made + below


def _buffers(codes: Tensor, lines: int, rooms: tuple[int, int]) -> list[Tensor]:
    """Counts and indices of the partial tiles of each line, then of the full.

    Each is a tensor of its own: one given to FlexAttention twice breaks its compilation.
    """
    of = codes.shape[:2]
    shapes = [shape for room in rooms for shape in ((*of, lines), (*of, lines, room))]
    return [torch.empty(shape, dtype=torch.int32, device=codes.device) for shape in shapes]
