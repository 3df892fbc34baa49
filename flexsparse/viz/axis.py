"""A length cut two ways: into tiles, and into the cells of a picture.

One of the two is a whole number of the other, so that both are whole numbers of *units*, the smaller
one. Where a cell holds more tiles than a picture can afford, some of them stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexsparse.shapes import ceil_div


@dataclass(frozen=True)
class Axis:
    """``looked`` units of each cell are looked at, drawn with ``seed`` where that is not all."""

    length: int
    tile: int
    cell: int
    looked: int = 1
    seed: int = 0

    @staticmethod
    def fitting(length: int, tile: int, cells: int, units: int, seed: int = 0) -> Axis:
        """The finest of at most ``cells`` cells, looking at no more than about ``units`` units.

        >>> Axis.fitting(4096, 128, 70, 1024).cell, Axis.fitting(131072, 128, 70, 1024).cell
        (64, 1920)
        """
        least = ceil_div(length, cells)
        divisors = [n for n in range(least, tile + 1) if tile % n == 0]
        cell = divisors[0] if divisors else ceil_div(least, tile) * tile
        held = max(1, cell // tile)
        return Axis(length, tile, cell, min(held, max(1, units // ceil_div(length, cell))), seed)

    @property
    def cells(self) -> int:
        return ceil_div(self.length, self.cell)

    @property
    def tiles(self) -> int:
        return ceil_div(self.length, self.tile)

    @property
    def unit(self) -> int:
        return min(self.cell, self.tile)

    @property
    def units(self) -> int:
        """How many units there are, looked at or not."""
        return ceil_div(self.length, self.unit)

    @property
    def whole(self) -> bool:
        """Whether every unit is looked at."""
        return self.looked == max(1, self.cell // self.tile)

    @property
    def per_tile(self) -> int:
        """Units in a tile."""
        return self.tile // self.unit

    @cached_property
    def index(self) -> Tensor:
        """``[cells * looked]``: the units looked at, cell by cell; the last cell may name some past
        the end, which hold nothing."""
        held = self.cell // self.unit
        first = torch.arange(self.cells, device="cpu") * held
        there = (self.units - first).clamp(max=held)
        steps = torch.arange(self.looked, device="cpu")
        if self.whole:
            chosen = steps.expand(self.cells, -1)
        else:
            draw = torch.rand(
                (self.cells, self.looked),
                generator=torch.Generator().manual_seed(self.seed),
                device="cpu",
            )
            chosen = ((steps + draw) / self.looked * there[:, None]).to(torch.int64)
        return (first[:, None] + chosen).flatten()

    @cached_property
    def size(self) -> Tensor:
        """``[cells * looked]``: how many positions each of these units has."""
        return (self.length - self.index * self.unit).clamp(0, self.unit)

    @cached_property
    def slot(self) -> Tensor:
        """``[units]``: where in ``index`` a unit stands, -1 where it is not looked at."""
        found = torch.full((self.units,), -1, dtype=torch.int64, device="cpu")
        inside = self.size > 0
        found[self.index[inside]] = inside.nonzero()[:, 0]
        return found
