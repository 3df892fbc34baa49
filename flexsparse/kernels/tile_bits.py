"""The bits of tiles from their lists, as `column_tiles` takes them: the way back from `row_tiles`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.kernels.compress import expand
from flexsparse.kernels.rows import pack_bits
from flexsparse.shapes import ceil_div


def tile_bits(lists: Sequence[Tensor], columns: int) -> Tensor:
    """int32 ``[2, B, H, R, ceil(C / 32)]`` of rising lists: counts ``[B, H, R]`` and indices ``[B, H, R, W]``
    of partial tiles, then of full."""
    if not lists[0].is_cuda:
        return by_map(lists, columns)
    run = torch.ops.flexsparse.tile_bits if torch.compiler.is_compiling() else filled
    bits: Tensor = run(list(lists), columns)
    return bits


def by_map(lists: Sequence[Tensor], columns: int) -> Tensor:
    """The specification of the kernel."""
    return pack_bits(torch.stack([expand(lists[i], lists[i + 1], columns) for i in (0, 2)]))


def filled(lists: list[Tensor], columns: int) -> Tensor:
    """By the kernel."""
    from flexsparse.kernels.triton_tile_bits import launch

    return launch(lists, columns)


_operator = custom_op("flexsparse::tile_bits", filled, mutates_args=())


@_operator.register_fake
def _(lists: list[Tensor], columns: int) -> Tensor:
    return lists[0].new_empty((2, *lists[0].shape, ceil_div(columns, 32)))
