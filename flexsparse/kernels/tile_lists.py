"""A map of codes as all the lists that kernels walk: each way along the map in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.kernels.compress import compress
from flexsparse.kernels.rows import FULL, PARTIAL


def tile_lists(codes: Tensor, partial: int, full: int) -> list[Tensor]:
    """int8 ``[B, H, R, C]``, by any strides -> counts ``[B, H, R]`` and indices of the partial tiles
    ``[B, H, R, partial]``, then of the full ``[B, H, R, full]``, as in `compress`."""
    if codes.is_cuda:
        from flexsparse.kernels.triton_tile_lists import launch

        return launch(codes, partial, full)
    return by_map(codes, partial, full)


def by_map(codes: Tensor, partial: int, full: int) -> list[Tensor]:
    """The specification of the kernel."""
    return [*compress(codes == PARTIAL, partial), *compress(codes == FULL, full)]


def longest(codes: Tensor) -> list[int]:
    """How many partial and full tiles a row has at most, then a column. Reads the device once."""
    found = [(codes == code).sum(axis).amax() for axis in (-1, -2) for code in (PARTIAL, FULL)]
    counted: list[int] = torch.stack(found).tolist()
    return counted
