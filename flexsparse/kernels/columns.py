"""The tiles of each column from those of each row: what the gradients of keys and values walk."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexsparse.kernels.compress import compress
from flexsparse.kernels.rows import unpack_bits


class ColumnTiles(NamedTuple):
    """Counts ``[B, H, C]`` and rows ``[B, H, C, capacity]``, and 0-d the most rows of any column.

    Where that is beyond the capacity, what did not fit is missing: whoever asked must ask again.
    """

    partial_num: Tensor
    partial_idx: Tensor
    full_num: Tensor
    full_idx: Tensor
    most: Tensor

    @property
    def capacity(self) -> int:
        return self.partial_idx.shape[-1]


def column_tiles(bits: Tensor, columns: int, capacity: int) -> ColumnTiles:
    """``bits [2, B, H, R, ceil(C / 32)]`` as `row_tiles` gives them."""
    if bits.is_cuda:
        from flexsparse.kernels.triton_columns import launch

        return launch(bits, columns, capacity)
    partial, full = unpack_bits(bits, columns).transpose(-1, -2)
    most = max_count(partial).maximum(max_count(full))
    return ColumnTiles(*compress(partial, capacity), *compress(full, capacity), most)


def max_count(present: Tensor) -> Tensor:
    return present.sum(-1).amax()
