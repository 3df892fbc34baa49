"""`compress` as one kernel: a program a row, walking along it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import next_power_of_two


@triton.jit
def _compress(
    present, counts, indices, columns, capacity, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    into = indices + row * capacity
    lane = tl.arange(0, WIDTH)
    count = tl.zeros([], tl.int32)
    for start in range(0, columns, WIDTH):
        column = start + lane
        listed = tl.load(present + row * columns + column, mask=column < columns, other=0)
        listed = (listed != 0).to(tl.int32)
        slot = count + tl.cumsum(listed, 0) - 1
        tl.store(into + slot, column, mask=(listed != 0) & (slot < capacity))
        count += tl.sum(listed, 0)
    tl.store(counts + row, tl.minimum(count, capacity))
    for start in range(0, capacity, WIDTH):
        slot = start + lane
        tl.store(into + slot, 0, mask=(slot >= count) & (slot < capacity))


def launch(present: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    *shape, columns = present.shape
    counts = torch.empty(shape, dtype=torch.int32, device=present.device)
    indices = torch.empty((*shape, capacity), dtype=torch.int32, device=present.device)
    width = max(32, min(1024, next_power_of_two(columns)))
    if counts.numel():
        dispatch(
            _compress, (counts.numel(),),
            present.contiguous().view(torch.uint8), counts, indices, columns, capacity,
            WIDTH=width, num_warps=max(1, width // 256),
        )  # fmt: skip
    return counts, indices
