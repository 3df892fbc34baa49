"""`sorted_unique` as one kernel: some rows a program, sorted in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

# One row must fit into the registers of a program.
MOST = 4096
_NUMBERS_A_PROGRAM = 1024


@triton.jit
def _join(first, last, distinct, first_b, last_b, distinct_b):
    return first, last_b, distinct + distinct_b - (last == first_b).to(tl.int32)


@triton.jit
def _sorted_unique(
    indices, unique, rows, kept, limit, out_width,
    row_stride, slot_stride, ROWS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    NONE: tl.constexpr = 2147483647
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    slot = tl.arange(0, KEPT)[None, :]
    inside = (row < rows) & (slot < kept)
    value = tl.load(indices + row * row_stride + slot * slot_stride, mask=inside, other=-1)
    valid = (value >= 0) & (value < limit)
    value = tl.sort(tl.where(valid, value, NONE).to(tl.int32), dim=1)
    ones = tl.full([ROWS, KEPT], 1, tl.int32)
    _, _, rank = tl.associative_scan((value, value, ones), 1, _join)
    count = tl.max(tl.where(value == NONE, 0, rank), 1)[:, None]
    # Equal values share a rank: they write the same number to the same place.
    tl.store(unique + row * out_width + rank - 1, value, mask=(row < rows) & (value != NONE))
    unused = (slot >= count) & (slot < out_width) & (row < rows)
    tl.store(unique + row * out_width + slot, -1, mask=unused)


def launch(indices: Tensor, limit: int, width: int) -> Tensor:
    kept = indices.shape[-1]
    flat = indices.reshape(-1, kept)
    unique = torch.empty((*indices.shape[:-1], width), dtype=torch.int32, device=indices.device)
    padded = max(2, next_power_of_two(kept))
    rows = max(1, min(32, _NUMBERS_A_PROGRAM // padded))
    dispatch(
        _sorted_unique, (ceil_div(len(flat), rows),),
        flat, unique, len(flat), kept, limit, width, flat.stride(0), flat.stride(1),
        ROWS=rows, KEPT=padded, num_warps=4 if padded <= 1024 else 8,
    )  # fmt: skip
    return unique
