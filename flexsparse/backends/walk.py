"""The walk of a tile kernel, all rows in step: who visits which tile, and the scores found there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.kernels.parts import PAIRS_AT_ONCE
from flexsparse.program import ScoreProgram, mask_of, score_of
from flexsparse.rules import MaskMod


class Tiles(NamedTuple):
    """Flat ids of the rows that step, the column each of them visits, and whether it is masked."""

    row: Tensor
    column: Tensor
    masked: bool


class Walk(NamedTuple):
    """Everything a step needs, in the precision of the computation."""

    q: Tensor
    k: Tensor
    v: Tensor
    span: Span
    mask: MaskMod
    score: ScoreProgram | None
    scale: float

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def queries(self, x: Tensor, at: Tensor) -> Tensor:
        """Row tiles ``[n, q_tile, …]`` of ``x [B, H, Q, …]``, for flat row ids."""
        b, h, r = _unflatten(at, self.heads, self.span.tiles[0])
        index = r[:, None] * self.span.q_tile + _arange(self.span.q_tile, at)
        return x[b[:, None], h[:, None], index.clamp(max=self.span.q_len - 1)]

    def keys(self, x: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Column tiles ``[n, kv_tile, …]`` of ``x [B, G, S, …]`` for the heads of the rows."""
        b, h, _ = _unflatten(row, self.heads, self.span.tiles[0])
        g = h // (self.heads // x.shape[1])
        index = column[:, None] * self.span.kv_tile + _arange(self.span.kv_tile, row)
        return x[b[:, None], g[:, None], index.clamp(max=self.span.kv_len - 1)]

    def pairs(self, tiles: Tiles) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Raw scores ``[n, q_tile, kv_tile]``, the indices of their pairs, and what is seen."""
        b, h, r = (x[:, None, None] for x in _unflatten(tiles.row, self.heads, self.span.tiles[0]))
        column = tiles.column[:, None, None]
        q = r * self.span.q_tile + _arange(self.span.q_tile, r)[:, None]
        kv = column * self.span.kv_tile + _arange(self.span.kv_tile, r)
        seen = (q < self.span.q_len) & (kv < self.span.kv_len)
        at = (b, h, q.clamp(max=self.span.q_len - 1), kv.clamp(max=self.span.kv_len - 1))
        if tiles.masked:
            seen = seen & self.mask(*at)
        keys = self.keys(self.k, tiles.row, tiles.column)
        raw = self.queries(self.q, tiles.row) @ keys.transpose(-1, -2) * self.scale
        return raw, at, seen

    def rescored(self, raw: Tensor, at: tuple[Tensor, ...], *score_tables: Tensor) -> Tensor:
        """Scores after the score rule."""
        assert self.score is not None
        # A score that ignores the old one need not vary with the pair.
        return self.score.mod(score_tables)(raw, *at).to(raw.dtype).broadcast_to(raw.shape)


def _unflatten(at: Tensor, heads: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return at // (heads * rows), at // rows % heads, at % rows


def _arange(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)


def steps(
    counts: Sequence[Tensor], indices: Sequence[Tensor], shape: tuple[int, int], area: int
) -> Iterator[Tiles]:
    """Step j of every row whose list has a j-th tile: partial lists first, then full ones."""
    for masked, count, index in zip((True, False), counts, indices, strict=True):
        flat_count = count.expand(*shape, -1).reshape(-1)
        flat_index = index.expand(*shape, -1, -1).reshape(-1, index.shape[-1])
        at_once = max(1, PAIRS_AT_ONCE[count.device.type] // area)
        for j in range(int(flat_count.max())):
            active = (flat_count > j).nonzero()[:, 0]
            for rows in active.split(at_once):
                yield Tiles(rows, flat_index[rows, j].to(torch.int64), masked)


def computing(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def walk_of(
    q: Tensor, k: Tensor, v: Tensor, mask_tables: list[Tensor], mask_key: str, score_key: str,
    block_size: Sequence[int], scale: float,
) -> Walk:  # fmt: skip
    dtype = computing(q)
    span = Span(q.shape[2], k.shape[2], block_size[0], block_size[1])
    return Walk(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        span,
        mask_of(mask_key).within(mask_tables, block_size),
        score_of(score_key),
        scale,
    )
