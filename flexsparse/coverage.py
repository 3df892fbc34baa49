"""What a mask allows inside tiles, by evaluating the pairs of those tiles and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.kernels.parts import PAIRS_AT_ONCE
from flexsparse.rules import MaskMod
from flexsparse.shapes import ceil_div


class Span(NamedTuple):
    """Lengths and tile sizes of a layout in kernel coordinates."""

    q_len: int
    kv_len: int
    q_tile: int
    kv_tile: int

    @property
    def tiles(self) -> tuple[int, int]:
        return ceil_div(self.q_len, self.q_tile), ceil_div(self.kv_len, self.kv_tile)


def pairs(mask: MaskMod, tiles: Tensor, span: Span) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each chunk of ``tiles [n, 4]`` (b, h, row, column): which pairs exist, and are allowed.

    Yields the chunk, ``allowed [c, q_tile, kv_tile]`` and ``exists [c, q_tile, kv_tile]``. The mask
    is asked only about queries and keys of the call: past the end it is asked about the last one.
    """
    at_once = max(1, PAIRS_AT_ONCE[tiles.device.type] // (span.q_tile * span.kv_tile))
    within_q = torch.arange(span.q_tile, device=tiles.device)
    within_kv = torch.arange(span.kv_tile, device=tiles.device)
    for start in range(0, len(tiles), at_once):
        chunk = slice(start, min(start + at_once, len(tiles)))
        b, h, row, column = tiles[chunk][:, :, None, None].unbind(1)
        q = row * span.q_tile + within_q[:, None]
        kv = column * span.kv_tile + within_kv[None]
        exists = (q < span.q_len) & (kv < span.kv_len)
        allowed = mask(b, h, q.clamp(max=span.q_len - 1), kv.clamp(max=span.kv_len - 1))
        yield chunk, allowed & exists, exists


class Coverage(NamedTuple):
    """Per tile: how many pairs are allowed, whether all that exist are; and who sees anything."""

    visible: Tensor
    full: Tensor
    queries: Tensor
    keys: Tensor


def cover(mask: MaskMod, tiles: Tensor, span: Span) -> Coverage:
    """Evaluates ``tiles [n, 4]``: counts ``[n]``, ``queries [n, q_tile]``, ``keys [n, kv_tile]``."""
    parts = [
        Coverage(
            allowed.sum((1, 2)), (allowed == exists).all(2).all(1), allowed.any(2), allowed.any(1)
        )
        for _, allowed, exists in pairs(mask, tiles, span)
    ]
    if not parts:
        empty = torch.zeros((0, 1), dtype=torch.bool, device=tiles.device)
        return Coverage(empty.sum(1), empty.any(1), empty, empty)
    return Coverage(*(torch.cat(x) for x in zip(*parts, strict=True)))


def every_tile(batch: int, heads: int, span: Span, device: torch.device) -> Tensor:
    """``[n, 4]``: all tiles, row by row, without asking the device anything."""
    rows, columns = span.tiles
    sizes = (batch, heads, rows, columns)
    axes = [torch.arange(n, device=device) for n in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 4)
