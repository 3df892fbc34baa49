"""The colours of pictures: told apart by their lightness too, and without red beside green.

Blue and orange are those of Okabe and Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.viz.raster import Raster


@dataclass(frozen=True)
class Palette:
    """``full`` and ``seen`` are pairs seen in full and partial tiles, ``hidden`` pairs computed in
    vain, ``paper`` those skipped, ``candidate`` an outline."""

    paper: str
    ink: str
    line: str
    full: str
    seen: str
    hidden: str
    candidate: str


LIGHT = Palette(
    paper="#ffffff", ink="#1c2024", line="#c9ccd3", full="#0072b2", seen="#e69f00",
    hidden="#f7e4bd", candidate="#3b1f5b",
)  # fmt: skip
DARK = Palette(
    paper="#15171a", ink="#eceef2", line="#3d424a", full="#56b4e9", seen="#e69f00",
    hidden="#574317", candidate="#f3d9ff",
)  # fmt: skip

# The least tint of a cell that holds anything, and the least part in it of pairs that are seen, so
# that one column of tiles in a thousand is seen, and one pair in a tile.
_LEAST = 0.65
_LEAST_SEEN = 0.3


def colours(raster: Raster, palette: Palette) -> Tensor:
    """``[rows, columns, 3]`` from 0 to 1: each cell the mean colour of its pairs, sparse ones raised."""
    held = raster.full + raster.partial
    seen = raster.seen - raster.full
    seen = torch.where(seen > 0, torch.maximum(seen, _LEAST_SEEN * raster.partial), 0.0)
    parts = torch.stack([raster.full, seen, (raster.partial - seen).clamp(min=0)], -1)
    mixed = torch.stack([rgb(c) for c in (palette.full, palette.seen, palette.hidden)])
    tint = torch.where(held > 0, held.clamp(min=_LEAST), 0.0)[..., None]
    mean = (parts @ mixed) / torch.where(held > 0, held, 1.0)[..., None]
    return (tint * mean + (1 - tint) * rgb(palette.paper)).clamp(0, 1)


def rgb(colour: str) -> Tensor:
    """``[3]`` of ``#rrggbb``."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return torch.tensor(parts, dtype=torch.float64, device="cpu")
