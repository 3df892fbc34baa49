"""How blocks of a selection lie on the tiles of a layout, and whose candidates a list is made from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.shapes import ceil_div


class Geometry(NamedTuple):
    """Rows of ``q_block`` queries and candidates of ``kv_block`` keys, under tiles of their own sizes."""

    q_len: int
    kv_len: int
    q_block: int
    kv_block: int
    q_tile: int
    kv_tile: int

    @property
    def tiles(self) -> tuple[int, int]:
        return ceil_div(self.q_len, self.q_tile), ceil_div(self.kv_len, self.kv_tile)

    @property
    def rows_per_tile(self) -> int:
        """The most rows of the selection that one row of tiles meets, however they lie."""
        return _met(self.q_tile, self.q_block, self.q_len)

    @property
    def tiles_per_row(self) -> int:
        """The most rows of tiles that one row of the selection meets."""
        return _met(self.q_block, self.q_tile, self.q_len)

    @property
    def tiles_per_candidate(self) -> int:
        return _met(self.kv_block, self.kv_tile, self.kv_len)

    def row_capacity(self, candidates: int) -> int:
        """The most tiles that a row of tiles can list when each row names ``candidates`` blocks."""
        named = self.rows_per_tile * candidates * self.tiles_per_candidate
        return max(1, min(self.tiles[1], named))

    def incidences(self, device: torch.device) -> Tensor:
        """``[R, C]``: how many (row, candidate) meet each tile; so many are needed to fill it."""
        rows, columns = self.tiles
        met = []
        for count, tile, block, length in (
            (rows, self.q_tile, self.q_block, self.q_len),
            (columns, self.kv_tile, self.kv_block, self.kv_len),
        ):
            first = torch.arange(count, device=device) * tile
            last = (first + tile).clamp(max=length) - 1
            met.append(last // block - first // block + 1)
        return met[0][:, None] * met[1][None]


class Lists(NamedTuple):
    """Lists in kernel coordinates ``[batch, heads]``, and how they name a logical batch and head.

    ``fold`` KV heads are part of the kernel's batch; ``query_heads`` heads there are logically.
    """

    batch: int
    heads: int
    fold: int
    query_heads: int

    def of(self, logical: Tensor) -> Tensor:
        """``[B or 1, H, …]``, H of 1, Hkv or Hq -> ``[batch, heads, …]`` in kernel coordinates."""
        entry = torch.arange(self.batch, device=logical.device)[:, None]
        lane = torch.arange(self.heads, device=logical.device)[None]
        b = (entry // self.fold).clamp(max=logical.shape[0] - 1)
        head = entry % self.fold * (self.query_heads // self.fold) + lane
        return logical[b, head * logical.shape[1] // self.query_heads]


def _met(size: int, other: int, length: int) -> int:
    """How many pieces of ``other`` a piece of ``size`` meets at most, each at multiples of its own."""
    if not other % size:
        return 1
    size = min(size, length)
    if not size % other:
        return size // other
    return (size - 2) // min(other, length) + 2
