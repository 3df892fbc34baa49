"""The tiles of each column from those of each row: what the gradients of keys and values walk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.kernels.compress import compress
from flexsparse.kernels.rows import unpack_bits


class ColumnTiles(NamedTuple):
    """Counts ``[B, H, C]`` and rows ``[B, H, C, capacity]``, and ``degrees [2, B, H, C]``: how many
    rows each column really has.

    Where that is beyond the capacity, what did not fit is missing: whoever asked must ask again.
    """

    partial_num: Tensor
    partial_idx: Tensor
    full_num: Tensor
    full_idx: Tensor
    degrees: Tensor

    @property
    def capacity(self) -> int:
        return self.partial_idx.shape[-1]

    @property
    def most(self) -> Tensor:
        """0-d: the most rows of any column."""
        return self.degrees.amax()


def column_tiles(bits: Tensor, columns: int, capacity: int) -> ColumnTiles:
    """``bits [2, B, H, R, ceil(C / 32)]`` as `row_tiles` gives them."""
    if bits.is_cuda:
        run = torch.ops.flexsparse.column_tiles if torch.compiler.is_compiling() else filled
        counts, slots = run(bits, columns, capacity)
        num, degrees = counts.unbind(0)
        partial_num, full_num = num.unbind(0)
        partial_idx, full_idx = slots.unbind(0)
        return ColumnTiles(partial_num, partial_idx, full_num, full_idx, degrees)
    partial, full = unpack_bits(bits, columns).transpose(-1, -2)
    degrees = torch.stack([partial, full]).sum(-1, dtype=torch.int32)
    return ColumnTiles(*compress(partial, capacity), *compress(full, capacity), degrees)


def filled(bits: Tensor, columns: int, capacity: int) -> tuple[Tensor, Tensor]:
    """By the kernel: counts ``[2, 2, B, H, C]``, listed then real, and slots ``[2, B, H, C, capacity]``."""
    from flexsparse.kernels.triton_columns import launch

    return launch(bits, columns, capacity)


_operator = custom_op("flexsparse::column_tiles", filled, mutates_args=())


@_operator.register_fake
def _(bits: Tensor, columns: int, capacity: int) -> tuple[Tensor, Tensor]:
    lists = bits.shape[1:3]
    return bits.new_empty((2, 2, *lists, columns)), bits.new_empty((2, *lists, columns, capacity))
