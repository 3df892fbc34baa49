"""Stretches of tiles: what a rule makes of a grid, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.coverage import Span


class Runs(NamedTuple):
    """Stretches of tiles ``[n]``: a row (of all batches, heads and rows), first column, and one past.

    Ordered by row and column; none overlap.
    """

    row: Tensor
    first: Tensor
    stop: Tensor

    @property
    def widths(self) -> Tensor:
        return self.stop - self.first


@dataclass(frozen=True, eq=False)
class RuleTiles:
    """The tiles of a rule, row by row, over ``lists`` (batches, heads) with lists of their own.

    ``asked`` is how many tiles intervals left open, which were settled by asking pairs.
    """

    partial: Runs
    full: Runs
    lists: tuple[int, int]
    span: Span
    asked: int


def those(runs: Runs, kept: Tensor) -> Runs:
    """The runs that are ``kept``. Reads the device once."""
    at = kept.nonzero()[:, 0]
    return Runs(*(x[at] for x in runs))


def ordered(runs: Runs, columns: int) -> Runs:
    """Runs in order, those that touch as one."""
    order = (runs.row * columns + runs.first).argsort()
    row, first, stop = (x[order] for x in runs)
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = (row[1:] != row[:-1]) | (first[1:] != stop[:-1])
    return Runs(row[begins], first[begins], stop[begins.roll(-1)])
