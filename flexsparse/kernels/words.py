"""Token candidates as tiles by way of their membership words, which need no sets: marked, then read once.

A bit is set however often its candidate is named, and in whatever order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexsparse.kernels import membership
from flexsparse.kernels.dedupe import by_sorts
from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.kernels.rows import EMPTY, FULL, PARTIAL, RowTiles, pack_bits
from flexsparse.kernels.tile_lists import tile_lists


def token_tiles(
    given: Tensor, candidates: int, codes: Tensor | None, geometry: Geometry, lists: Lists
) -> RowTiles:
    """`row_tiles` of ``given [B, H, q_len, K]``: any order, repeats, numbers outside dropped."""
    words = marked(given, candidates)
    found, bits = tile_codes(words, codes, geometry, lists)
    room = geometry.row_capacity(given.shape[-1])
    partial_num, partial_idx, full_num, full_idx = tile_lists(found, (room, room))
    return RowTiles(partial_num, partial_idx, full_num, full_idx, bits, words)


def marked(given: Tensor, candidates: int) -> Tensor:
    """Membership words, as `membership.pack` makes them of sets."""
    if given.is_cuda:
        from flexsparse.kernels.triton_words import mark

        return mark(given, candidates)
    return membership.pack(by_sorts(given, candidates, given.shape[-1]), candidates)


def tile_codes(
    words: Tensor, codes: Tensor | None, geometry: Geometry, lists: Lists
) -> tuple[Tensor, Tensor]:
    """Words ``[B, H, ceil(q_len / 8), kv_len]`` met with what the rule makes of each tile: int8
    ``[batch, heads, R, C]`` in kernel coordinates, and the bits of `RowTiles`."""
    if words.is_cuda:
        from flexsparse.kernels.triton_words import launch

        return launch(words, codes, geometry, lists)
    return by_words(words, codes, geometry, lists)


def by_words(
    words: Tensor, codes: Tensor | None, geometry: Geometry, lists: Lists
) -> tuple[Tensor, Tensor]:
    """The specification of the kernel."""
    place = torch.arange(membership.WORD, dtype=torch.uint8, device=words.device)[:, None]
    seen = (torch.bitwise_right_shift(words[..., None, :], place) & 1) != 0
    seen = seen.flatten(2, 3)[:, :, : geometry.q_len]
    touched = lists.of(_by_tile(seen, geometry, fill=False).any(-1).any(3))
    covered = lists.of(_by_tile(seen, geometry, fill=True).all(-1).all(3))
    code = torch.full_like(touched, FULL, dtype=torch.int8) if codes is None else lists.of(codes)
    full = touched & covered & (code == FULL)
    partial = touched & (code != EMPTY) & ~full
    found = partial * PARTIAL + full * FULL
    return found.to(torch.int8), pack_bits(torch.stack([partial, full]))


def _by_tile(seen: Tensor, geometry: Geometry, *, fill: bool) -> Tensor:
    """Pairs ``[B, H, q_len, kv_len]`` as ``[B, H, R, q_tile, C, kv_tile]``; those past the ends ``fill``."""
    rows, columns = geometry.tiles
    q_tile, kv_tile = geometry.q_tile, geometry.kv_tile
    past = (0, columns * kv_tile - geometry.kv_len, 0, rows * q_tile - geometry.q_len)
    tiles = (*seen.shape[:2], rows, q_tile, columns, kv_tile)
    return pad(seen, past, value=fill).reshape(tiles)
