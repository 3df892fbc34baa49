"""A rule's tiles from coarse to fine: each row of tiles asks wide stretches of keys first.

Only stretches that are neither all seen nor all hidden are cut, into eight, so that a row costs what
the rule's border costs in it. Rows are fine from the start: what a rule reads at the query (its
document, its block of candidates) is then narrow, and cuts along the keys do the rest. Where that is
not narrow enough, and many stretches stay open, slices of the row's queries are asked one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.grid import Grid
from flexsparse.intervals.runs import RuleTiles, Runs, ordered, those
from flexsparse.intervals.settle import settle
from flexsparse.intervals.verdicts import Judge, Verdicts, Wide
from flexsparse.program import MaskProgram
from flexsparse.shapes import ceil_div

_CUT = 8
# Open stretches a row from which its queries are asked in slices, and in how many.
_MANY = 12
_SLICES = (2, 8)
# Stretches of which these are asked first, whether it decides any.
_SOME = 4096


def rule_tiles(
    program: MaskProgram,
    tables: list[Tensor],
    grid: Grid,
    span: Span,
    lists: tuple[int, int],
    device: torch.device,
    *,
    exact: bool = True,
) -> RuleTiles:
    """Every tile of a rule that is not empty. Reads the device a few times.

    ``tables`` are the program's. What intervals leave open is settled by its pairs; with
    ``exact=False`` it is called partial unseen, which is right but may list an empty tile, or mask
    inside a full one.
    """
    rows, columns = span.tiles
    asking = _Asking(Judge(program, grid, span, device), lists)
    size = 1
    while size * _CUT < columns:
        size *= _CUT
    wide = ceil_div(columns, size)
    row = torch.arange(lists[0] * lists[1] * rows, device=device).repeat_interleave(wide)
    place = torch.arange(wide, device=device).repeat(lists[0] * lists[1] * rows)
    full: list[Runs] = []
    while True:
        stretches = Runs(row, place * size, ((place + 1) * size).clamp(max=columns))
        found, left, may_fail = asking.decided(stretches)
        full.append(found)
        row = left.row
        place = left.first // size
        if size == 1:
            break
        size //= _CUT
        row = row.repeat_interleave(_CUT)
        place = (place[:, None] * _CUT + torch.arange(_CUT, device=device)).flatten()
        inside = place * size < columns
        row, place = row[inside], place[inside]
    partial = left
    if exact:
        tiles = torch.stack([*asking.named(left.row), left.first], 1)
        is_partial, is_full = settle(program.mod(tables), tiles, may_fail, span)
        partial = those(left, is_partial)
        full.append(those(left, is_full))
    runs = Runs(*(torch.cat(x) for x in zip(*full, strict=True)))
    asked = len(tiles) if exact else 0
    return RuleTiles(ordered(partial, columns), ordered(runs, columns), lists, span, asked)


class _Asking(NamedTuple):
    """A judge, asked about stretches of rows of all lists."""

    judge: Judge
    lists: tuple[int, int]

    def named(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batch, head and row of tiles that rows of all lists stand for."""
        rows = self.judge.span.tiles[0]
        entry = row // rows
        return entry // self.lists[1], entry % self.lists[1], row % rows

    def decided(self, stretches: Runs) -> tuple[Runs, Runs, Tensor]:
        """The full stretches, those left open, and of these which may fail."""
        full: list[Runs] = []

        def asked(stretches: Runs, slices: int) -> tuple[Runs, Tensor]:
            verdicts = self._verdicts(stretches, slices)
            full.append(those(stretches, verdicts.full))
            is_open = _is_open(verdicts)
            return those(stretches, is_open), verdicts.may_fail[is_open]

        left, may_fail = asked(stretches, 1)
        few = _MANY * self.lists[0] * self.lists[1] * self.judge.span.tiles[0]
        for slices in _SLICES:
            if len(left.row) > few and self._pays(left, slices):
                left, may_fail = asked(left, slices)
        return Runs(*(torch.cat(x) for x in zip(*full, strict=True))), left, may_fail

    def _pays(self, stretches: Runs, slices: int) -> bool:
        """Whether slices decide any of some stretches, spread over all: of many rules they decide none."""
        count = len(stretches.row)
        some = min(count, _SOME)
        at = torch.arange(some, device=stretches.row.device) * count // some
        stretches = Runs(*(x[at] for x in stretches))
        return not bool(_is_open(self._verdicts(stretches, slices)).all())

    def _verdicts(self, stretches: Runs, slices: int) -> Verdicts:
        span = self.judge.span
        b, h, row = self.named(stretches.row)
        step = ceil_div(span.q_tile, slices)
        verdicts = [
            self.judge(
                Wide(
                    b,
                    h,
                    row * span.q_tile + start,
                    row * span.q_tile + min(start + step, span.q_tile) - 1,
                    stretches.first,
                    stretches.stop - 1,
                )
            )
            for start in range(0, span.q_tile, step)
        ]
        full, empty, may_fail = (torch.stack(x) for x in zip(*verdicts, strict=True))
        return Verdicts(full.all(0), empty.all(0), may_fail.any(0))


def _is_open(verdicts: Verdicts) -> Tensor:
    return ~verdicts.full & ~verdicts.empty
