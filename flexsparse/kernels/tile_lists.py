"""A map of codes as all the lists that kernels walk: both ways along the map in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.kernels.compress import compress
from flexsparse.kernels.rows import FULL, PARTIAL

Rooms = tuple[int, int]


def tile_lists(
    codes: Tensor, across: Rooms, down: Rooms | None = None, unsettled: Tensor | None = None
) -> list[Tensor]:
    """int8 ``[B, H, R, C]``, by any strides -> counts ``[B, H, R]`` and indices of the partial tiles
    ``[B, H, R, room]``, then of the full, as in `compress`; with ``down`` the same by column too.

    ``across`` and ``down`` are the rooms for partial and for full tiles of a row and of a column.
    ``unsettled``, int32 ``[1]``, becomes 1 where a code is none of EMPTY, PARTIAL and FULL.
    """
    if codes.is_cuda:
        from flexsparse.kernels.triton_tile_lists import launch

        return launch(codes, across, down, unsettled)
    return by_map(codes, across, down, unsettled)


def by_map(
    codes: Tensor, across: Rooms, down: Rooms | None = None, unsettled: Tensor | None = None
) -> list[Tensor]:
    """The specification of the kernel."""
    if unsettled is not None and bool((codes > FULL).any()):
        unsettled.fill_(1)
    made = [*compress(codes == PARTIAL, across[0]), *compress(codes == FULL, across[1])]
    return made if down is None else made + by_map(codes.transpose(-1, -2), down)


def longest(codes: Tensor) -> list[int]:
    """How many partial and full tiles a row has at most, then a column. Reads the device once."""
    found = [(codes == code).sum(axis).amax() for axis in (-1, -2) for code in (PARTIAL, FULL)]
    counted: list[int] = torch.stack(found).tolist()
    return counted
