"""`tile_lists` as one kernel: a program a row, walking along it."""

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
    heads, rows, columns, stride_b, stride_h, stride_r, stride_c, partial_room, full_room,
    WIDTH: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    entry = line // rows
    start_of = codes + entry // heads * stride_b + entry % heads * stride_h + line % rows * stride_r
    partial_into = partial_idx + line * partial_room
    full_into = full_idx + line * full_room
    lane = tl.arange(0, WIDTH)
    partial = tl.zeros([], tl.int32)
    full = tl.zeros([], tl.int32)
    for start in range(0, columns, WIDTH):
        column = start + lane
        code = tl.load(start_of + column.to(tl.int64) * stride_c, mask=column < columns, other=0)
        is_partial = (code == 1).to(tl.int32)
        is_full = (code == 2).to(tl.int32)
        slot = partial + tl.cumsum(is_partial, 0) - 1
        tl.store(partial_into + slot, column, mask=(code == 1) & (slot < partial_room))
        slot = full + tl.cumsum(is_full, 0) - 1
        tl.store(full_into + slot, column, mask=(code == 2) & (slot < full_room))
        partial += tl.sum(is_partial, 0)
        full += tl.sum(is_full, 0)
    tl.store(partial_num + line, tl.minimum(partial, partial_room))
    tl.store(full_num + line, tl.minimum(full, full_room))
    for start in range(0, partial_room, WIDTH):
        slot = start + lane
        tl.store(partial_into + slot, 0, mask=(slot >= partial) & (slot < partial_room))
    for start in range(0, full_room, WIDTH):
        slot = start + lane
        tl.store(full_into + slot, 0, mask=(slot >= full) & (slot < full_room))


def launch(codes: Tensor, partial: int, full: int) -> list[Tensor]:
    batch, heads, rows, columns = codes.shape
    # Each is a tensor of its own: one given to FlexAttention twice breaks its compilation.
    partial_num, full_num = (
        torch.empty((batch, heads, rows), dtype=torch.int32, device=codes.device) for _ in range(2)
    )
    partial_idx, full_idx = (
        torch.empty((batch, heads, rows, room), dtype=torch.int32, device=codes.device)
        for room in (partial, full)
    )
    width = max(32, min(1024, next_power_of_two(columns)))
    dispatch(
        _tile_lists, (batch * heads * rows,),
        codes, partial_num, partial_idx, full_num, full_idx,
        heads, rows, columns, *codes.stride(), partial, full,
        WIDTH=width, num_warps=max(1, width // 256),
    )  # fmt: skip
    return [partial_num, partial_idx, full_num, full_idx]
