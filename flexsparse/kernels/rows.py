"""Candidates as the tiles of each row: dedup and merge at tile borders, full and partial apart.

A tile is touched where some candidate of some of its rows meets it, and covered where all of them
do. ``codes`` say what the rule makes of each tile: nothing of it (0), some pairs (1), or all (2).
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.kernels import membership
from flexsparse.kernels.compress import compress
from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.shapes import ceil_div

EMPTY, PARTIAL, FULL = 0, 1, 2


class RowTiles(NamedTuple):
    """Lists by row (counts ``[B, H, R]``, indices ``[B, H, R, capacity]``), the same tiles as bits
    ``[2, B, H, R, ceil(C / 32)]`` (partial, then full), and the selection's membership words."""

    partial_num: Tensor
    partial_idx: Tensor
    full_num: Tensor
    full_idx: Tensor
    bits: Tensor
    words: Tensor


class Source(NamedTuple):
    """What a kernel makes tiles of, as `row_tiles` takes it."""

    indices: Tensor
    candidates: int
    codes: Tensor | None
    geometry: Geometry
    lists: Lists

    def constants(self, into: RowTiles, at: Tensor | None) -> dict[str, bool | int]:
        """What it is compiled for, to fill ``into``: bits and words where all rows are written, and only
        where they have room."""
        whole, codes = at is None, self.codes
        return {
            "SEL_BATCHED": self.indices.shape[0] > 1,
            "CODE_BATCHED": codes is not None and codes.shape[0] > 1,
            "HAS_CODES": codes is not None,
            "HAS_WORDS": whole and into.words.numel() > 0,
            "HAS_BITS": whole and into.bits.numel() > 0,
            "HAS_AT": not whole,
            "FOLD": self.lists.fold,
        }


def row_tiles(
    indices: Tensor,
    candidates: int,
    codes: Tensor | None,
    geometry: Geometry,
    lists: Lists,
    *,
    words: bool = True,
) -> RowTiles:
    """``indices [B, H, R, K]``, unique or -1; ``codes [B, H, R, C]`` int8 in logical axes, or all 2.

    Without ``words`` those are left out: no kernel asks for them where tiles lie within candidates.
    """
    if indices.is_cuda and torch.compiler.is_compiling():
        # Whoever compiles goes around the kernel: it writes into buffers that share memory.
        made = torch.ops.flexsparse.row_tiles(
            indices, candidates, codes, list(geometry), list(lists), words
        )
        return opened(Buffers(*made), indices, candidates if words else 0, geometry, lists)
    kernel = _kernel(indices.shape[-1], geometry) if indices.is_cuda else None
    if kernel is not None:
        return by_kernel(kernel, indices, candidates, codes, geometry, lists, words)[1]
    return by_map(indices, candidates, codes, geometry, lists, words)


def rewrite(
    indices: Tensor,
    candidates: int,
    codes: Tensor | None,
    geometry: Geometry,
    lists: Lists,
    into: RowTiles,
    at: Tensor | None = None,
) -> None:
    """`row_tiles` into tensors that exist; bits and words only where they have room.

    ``at [n]`` names rows of tiles, repeats and all: their lists alone are written, and neither bits
    nor words.
    """
    kernel = _kernel(indices.shape[-1], geometry) if indices.is_cuda else None
    if kernel is not None:
        if at is None:
            into.words.zero_()
            if not kernel.writes_whole(geometry):
                into.bits.zero_()
        kernel.fill(Source(indices, candidates, codes, geometry, lists), into, at)
        # A backward that was to read what they held before is refused, as after torch's own writes.
        torch.autograd.graph.increment_version(into[:4] if at is not None else into)
        return
    capacity = into.partial_idx.shape[-1]
    words = at is None and into.words.numel() > 0
    made = by_map(indices, candidates, codes, geometry, lists, words, capacity, at)
    if at is None:
        for old, new in zip(into, made, strict=True):
            if old.numel():
                old.copy_(new)
        return
    for old, new in zip(into[:4], made[:4], strict=True):
        old.index_copy_(2, at, new)


def by_map(
    indices: Tensor,
    candidates: int,
    codes: Tensor | None,
    geometry: Geometry,
    lists: Lists,
    words: bool,
    capacity: int | None = None,
    at: Tensor | None = None,
) -> RowTiles:
    """The specification of the kernels: a map of all tiles, or of the rows ``at``, compressed."""
    if at is None:
        at = torch.arange(geometry.tiles[0], device=indices.device)
    touched = lists.of(_meetings(indices, geometry, at))
    covered = touched == geometry.incidences(indices.device)[at]
    code = torch.full_like(touched, FULL) if codes is None else lists.of(codes[:, :, at])
    full = (touched > 0) & covered & (code == FULL)
    partial = (touched > 0) & (code != EMPTY) & ~full
    capacity = geometry.row_capacity(indices.shape[-1]) if capacity is None else capacity
    return RowTiles(
        *compress(partial, capacity),
        *compress(full, capacity),
        pack_bits(torch.stack([partial, full])),
        membership.pack(indices, candidates) if words else no_words(indices),
    )


class Buffers(NamedTuple):
    """What a kernel fills: counts and slots, partial first; and what is cleared, bits then words."""

    counts: Tensor
    slots: Tensor
    cleared: Tensor


def buffers(
    indices: Tensor, candidates: int, geometry: Geometry, lists: Lists, *, whole: bool = False
) -> Buffers:
    """``candidates`` of 0 leave no place for words. Bits that are written ``whole`` need no clearing,
    but words do."""
    kept = indices.shape[-1]
    rows, columns = geometry.tiles
    shape = (2, lists.batch, lists.heads, rows)
    bits = 2 * lists.batch * lists.heads * rows * ceil_div(columns, 32)
    size = bits + ceil_div(_bytes(indices, candidates), 4)
    clear = indices.new_empty if whole and not candidates else indices.new_zeros
    return Buffers(
        indices.new_empty(shape, dtype=torch.int32),
        indices.new_empty((*shape, geometry.row_capacity(kept)), dtype=torch.int32),
        clear((size,), dtype=torch.int32),
    )


def _bytes(indices: Tensor, candidates: int) -> int:
    """Of the membership words."""
    batch, heads, rows, _ = indices.shape
    return batch * heads * ceil_div(rows, membership.WORD) * candidates


def opened(
    made: Buffers, indices: Tensor, candidates: int, geometry: Geometry, lists: Lists
) -> RowTiles:
    """Buffers as what they hold."""
    batch, heads = indices.shape[:2]
    rows, columns = geometry.tiles
    width = ceil_div(columns, 32)
    bits = 2 * lists.batch * lists.heads * rows * width
    partial_num, full_num = made.counts.unbind(0)
    partial_idx, full_idx = made.slots.unbind(0)
    tile_bits, words = made.cleared, no_words(indices)
    if candidates:
        size = _bytes(indices, candidates)
        words = tile_bits[bits:].view(torch.uint8)[:size].view(batch, heads, -1, candidates)
        tile_bits = tile_bits[:bits]
    tile_bits = tile_bits.view(2, lists.batch, lists.heads, rows, width)
    return RowTiles(partial_num, partial_idx, full_num, full_idx, tile_bits, words)


def filled(
    indices: Tensor,
    candidates: int,
    codes: Tensor | None,
    geometry: list[int],
    lists: list[int],
    words: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers filled by the kernel that suits; where none does, from the map."""
    g, of = Geometry(*geometry), Lists(*lists)
    kernel = _kernel(indices.shape[-1], g)
    if kernel is not None:
        return by_kernel(kernel, indices, candidates, codes, g, of, words)[0]
    found = by_map(indices, candidates, codes, g, of, words)
    return Buffers(
        torch.stack([found.partial_num, found.full_num]),
        torch.stack([found.partial_idx, found.full_idx]),
        torch.cat([found.bits.flatten(), _as_ints(found.words)]),
    )


def by_kernel(
    kernel: ModuleType,
    indices: Tensor,
    candidates: int,
    codes: Tensor | None,
    geometry: Geometry,
    lists: Lists,
    words: bool,
) -> tuple[Buffers, RowTiles]:
    """Buffers filled by ``kernel``, and what they hold."""
    kept = candidates if words else 0
    made = buffers(indices, kept, geometry, lists, whole=kernel.writes_whole(geometry))
    into = opened(made, indices, kept, geometry, lists)
    kernel.fill(Source(indices, candidates, codes, geometry, lists), into, None)
    return made, into


def _kernel(kept: int, geometry: Geometry) -> ModuleType | None:
    """The kernel that suits, if any does."""
    from flexsparse.kernels import triton_merge, triton_rows, triton_sorted

    for kernel in (triton_merge, triton_sorted):
        if kernel.suits(kept, geometry):
            return kernel
    return triton_rows if geometry.tiles[1] <= triton_rows.MOST_COLUMNS else None


_operator = custom_op("flexsparse::row_tiles", filled, mutates_args=())


@_operator.register_fake
def _(
    indices: Tensor,
    candidates: int,
    codes: Tensor | None,
    geometry: list[int],
    lists: list[int],
    words: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return buffers(indices, candidates if words else 0, Geometry(*geometry), Lists(*lists))


def no_words(indices: Tensor) -> Tensor:
    return indices.new_empty((*indices.shape[:2], 0, 0), dtype=torch.uint8)


def _as_ints(words: Tensor) -> Tensor:
    """Bytes as int32, filled up with zeros."""
    return torch.nn.functional.pad(words.flatten(), (0, -words.numel() % 4)).view(torch.int32)


def _meetings(indices: Tensor, geometry: Geometry, at: Tensor) -> Tensor:
    """int32 ``[B, H, n, C]``: how many (row, candidate) meet each tile of the rows ``at [n]``."""
    batch, heads = indices.shape[:2]
    columns = geometry.tiles[1]
    start = at[:, None].to(torch.int64) * geometry.q_tile
    last_q = (start + geometry.q_tile).clamp(max=geometry.q_len) - 1
    row = start // geometry.q_block + torch.arange(geometry.rows_per_tile, device=at.device)
    last = last_q // geometry.q_block
    chosen = indices[:, :, row.minimum(last)].to(torch.int64)
    chosen = torch.where((row <= last)[..., None], chosen, -1)
    first_c = chosen * geometry.kv_block // geometry.kv_tile
    last_c = ((chosen + 1) * geometry.kv_block).clamp(max=geometry.kv_len) - 1
    # One tile past the last: unused slots write there.
    met = torch.zeros(
        (batch, heads, len(at), columns + 1), dtype=torch.int32, device=indices.device
    )
    for step in range(geometry.tiles_per_candidate):
        c = first_c + step
        inside = (chosen >= 0) & (c <= last_c // geometry.kv_tile)
        slot = torch.where(inside, c, columns)
        met.scatter_add_(-1, slot.flatten(3), inside.flatten(3).to(torch.int32))
    return met[..., :-1]


def pack_bits(present: Tensor) -> Tensor:
    """bool ``[..., C]`` -> int32 ``[..., ceil(C / 32)]``; column c is bit c % 32 of word c // 32."""
    missing = -present.shape[-1] % 32
    padded = torch.nn.functional.pad(present, (0, missing)).unflatten(-1, (-1, 32))
    place = torch.arange(32, dtype=torch.int32, device=present.device)
    return torch.bitwise_left_shift(padded.to(torch.int32), place).sum(-1, dtype=torch.int32)


def unpack_bits(bits: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_bits`."""
    place = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((torch.bitwise_right_shift(bits[..., None], place) & 1) != 0).flatten(-2)[..., :columns]
