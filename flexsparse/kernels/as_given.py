"""Candidates in any order as the tiles of each row, by the kernels that need no sets."""

from __future__ import annotations

from torch import Tensor

from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.kernels.rows import RowTiles, by_kernel
from flexsparse.kernels.words import token_tiles


def given_tiles(
    given: Tensor,
    candidates: int,
    codes: Tensor | None,
    geometry: Geometry,
    lists: Lists,
    *,
    words: bool,
) -> RowTiles | None:
    """`row_tiles` of ``given [B, H, R, K]`` int32 or int64: any order and strides, repeats, numbers
    outside dropped. None where only sets will do."""
    if not given.is_cuda:
        return None
    if words and geometry.q_block == geometry.kv_block == 1:
        return token_tiles(given, candidates, codes, geometry, lists)
    from flexsparse.kernels import triton_sorted

    if not triton_sorted.suits(given.shape[-1], geometry):
        return None
    return by_kernel(triton_sorted, given, candidates, codes, geometry, lists, words)[1]
