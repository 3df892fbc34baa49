"""The tiles of each column from those of each row: what the gradients of keys and values walk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
        from flexsparse.kernels.triton_columns import launch

        return launch(bits, columns, capacity)
    partial, full = unpack_bits(bits, columns).transpose(-1, -2)
    degrees = torch.stack([partial, full]).sum(-1, dtype=torch.int32)
    return ColumnTiles(*compress(partial, capacity), *compress(full, capacity), degrees)
