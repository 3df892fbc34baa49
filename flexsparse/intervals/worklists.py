"""Runs of tiles as the lists that kernels walk, by row and by column."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.device import Raised
from flexsparse.grid import Grid
from flexsparse.intervals.finding import MAPPED, found_tiles, settled_map
from flexsparse.intervals.fused import FusedJudge, fused_judge
from flexsparse.intervals.painting import painted
from flexsparse.intervals.refine import rule_tiles
from flexsparse.intervals.runs import RuleTiles, Runs
from flexsparse.kernels.columns import side_by_side
from flexsparse.kernels.tile_lists import longest, tile_lists
from flexsparse.program import MaskProgram
from flexsparse.rules import MaskMod

# Lists of so many slots in all are as wide as the grid, as torch makes them; larger ones as needed.
WHOLE = 2**22
# Slots written, or tiles of a map compared, at once.
_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
# A grid of which at least this part is listed is turned as a map, any other by sorting.
_DENSE = 1 / 16


def rule_lists(
    program: MaskProgram,
    tables: list[Tensor],
    grid: Grid,
    span: Span,
    lists: tuple[int, int],
    device: torch.device,
    *,
    by_column: bool = True,
) -> list[Tensor]:
    """The lists of a rule alone, as of `lists_of`; ``tables`` are the program's."""
    judge = fused_judge(program, tables, span, lists, device)
    if judge is None:
        tiles = rule_tiles(program, tables, grid, span, lists, device)
    elif judge.tiles <= MAPPED:
        return _judged(judge, program.mod(tables), by_column)
    else:
        tiles = found_tiles(judge, program.mod(tables))
    return lists_of(tiles, by_column=by_column)


def _judged(judge: FusedJudge, mask: MaskMod, by_column: bool) -> list[Tensor]:
    """Launched before the host hears whether tiles are left open; for these they are made anew."""
    codes = judge.every()
    left_open = Raised(codes.device)
    made = lists_of_map(codes, by_column=by_column, unsettled=left_open.flag)
    if not left_open.heard():
        return made
    return lists_of_map(settled_map(judge, mask, codes), by_column=by_column)


def lists_of(tiles: RuleTiles, *, by_column: bool = True) -> list[Tensor]:
    """Counts and indices by row of the partial tiles and of the full; then, where asked, by column.

    As in `compress`, but lists of a large grid are no wider than their longest needs, rounded up to a
    power of two so that few shapes of lists, and so few kernels, come about; both kinds by the same strides.
    """
    rows, columns = tiles.span.tiles
    kinds = (tiles.partial, tiles.full)
    lists = tiles.lists[0] * tiles.lists[1]
    if tiles.full.row.is_cuda and lists * rows * columns <= WHOLE:
        # Run by run is many small kernels: where a map is small, it is one for each way.
        return lists_of_map(painted(tiles), by_column=by_column)
    by_row = [_written(runs, (*tiles.lists, rows), columns) for runs in kinds]
    if not by_column:
        return _alike([x for pair in by_row for x in pair])
    turned = [_turned(runs, lists, rows, columns) for runs in kinds]
    down = [_written(runs, (*tiles.lists, columns), rows) for runs in turned]
    return _alike([x for pair in (*by_row, *down) for x in pair])


def lists_of_map(
    codes: Tensor, *, by_column: bool = True, unsettled: Tensor | None = None
) -> list[Tensor]:
    """The same of a map of codes, int8 ``[B, H, R, C]``; ``unsettled`` as of `tile_lists`."""
    rows, columns = codes.shape[2:]
    across, down = (columns, columns), (rows, rows)
    if codes.numel() > WHOLE:
        a, b, c, d = longest(codes)
        across = _width(a, columns), _width(b, columns)
        down = _width(c, rows), _width(d, rows)
    made = tile_lists(codes, across, down if by_column else None, unsettled)
    return _alike(made)


def _alike(lists: list[Tensor]) -> list[Tensor]:
    """The lists, of which both kinds have the same strides: torch 2.11 reads the full by those of the
    partial. By row, where many kernels take lists as contiguous, one is padded."""
    wide = max(lists[1].shape[-1], lists[3].shape[-1])
    for i in (1, 3):
        if missing := wide - lists[i].shape[-1]:
            lists[i] = torch.nn.functional.pad(lists[i], (0, missing))
    if len(lists) > 4 and lists[5].shape != lists[7].shape:
        lists[5], lists[7] = side_by_side(lists[5], lists[7])
    return lists


def _written(runs: Runs, shape: tuple[int, int, int], columns: int) -> tuple[Tensor, Tensor]:
    """Counts ``shape`` and indices ``[*shape, width]``, both int32."""
    widths, rows = runs.widths, shape[0] * shape[1] * shape[2]
    device = widths.device
    counts = torch.zeros(rows, dtype=torch.int64, device=device)
    counts.index_add_(0, runs.row, widths)
    indices = _slots(counts, columns)
    start = widths.cumsum(0) - widths - (counts.cumsum(0) - counts)[runs.row]
    # Within a run the index less its slot stays the same; where the next begins it grows by the gap.
    gap = runs.first.clone()
    gap[1:] -= torch.where(runs.row[1:] == runs.row[:-1], runs.stop[:-1], 0)
    slot = torch.arange(indices.shape[1], dtype=torch.int32, device=device)
    step = max(1, _AT_ONCE[device.type] // indices.shape[1])
    for (first, stop), (row, at, grown) in _by_rows(runs.row, (runs.row, start, gap), rows, step):
        part = indices[first:stop]
        part[row - first, at] = grown.to(torch.int32)
        torch.cumsum(part, 1, dtype=torch.int32, out=part)
        part += slot
        part *= slot < counts[first:stop, None]
    return counts.to(torch.int32).view(shape), indices.view(*shape, -1)


def _turned(runs: Runs, lists: int, rows: int, columns: int) -> Runs:
    """The same tiles as runs along the columns."""
    cells = lists * rows * columns
    if cells <= WHOLE or int(runs.widths.sum()) > cells * _DENSE:
        return _turned_as_map(runs, lists, rows, columns)
    run = torch.arange(len(runs.row), device=runs.row.device).repeat_interleave(runs.widths)
    before = runs.widths.cumsum(0) - runs.widths
    entry = runs.row[run]
    column = runs.first[run] + torch.arange(len(run), device=run.device) - before[run]
    column, order = (entry // rows * columns + column).sort(stable=True)
    row = entry[order] % rows
    return Runs(column, row, row + 1)


def _turned_as_map(runs: Runs, lists: int, rows: int, columns: int) -> Runs:
    device = runs.row.device
    step = max(1, _AT_ONCE[device.type] // columns)
    found = []
    # One list at a time, between two rows of nothing; one column more holds where a row's last ends.
    present = torch.empty((rows + 2, columns + 1), dtype=torch.int8, device=device)
    bounds = torch.searchsorted(runs.row, torch.arange(lists + 1, device=device) * rows).tolist()
    for i in range(lists):
        present.zero_()
        own = Runs(*(x[bounds[i] : bounds[i + 1]] for x in runs))
        row = own.row - i * rows
        for (first, stop), (at, begin, end) in _by_rows(
            row, (row, own.first, own.stop), rows, step
        ):
            part = present[1 + first : 1 + stop]
            part[at - first, begin] = 1
            part[at - first, end] = -1
            torch.cumsum(part, 1, dtype=torch.int8, out=part)
        strip = max(1, _AT_ONCE[device.type] // rows)
        for first in range(0, columns, strip):
            part = present[:, first : min(first + strip, columns)].t().contiguous()
            # Down a column what differs from the row above are the beginnings and ends in turn.
            column, edge = (part[:, 1:] != part[:, :-1]).nonzero().unbind(1)
            found.append(Runs(i * columns + first + column[::2], edge[::2], edge[1::2]))
    return Runs(*(torch.cat(x) for x in zip(*found, strict=True)))


def _by_rows(
    row: Tensor, values: tuple[Tensor, ...], rows: int, step: int
) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """``values`` of the runs in each ``step`` rows; ``row`` rises."""
    firsts = list(range(0, rows, step))
    edges = torch.tensor([*firsts, rows], device=row.device)
    bounds = torch.searchsorted(row, edges).tolist()
    for first, low, high in zip(firsts, bounds, bounds[1:], strict=False):
        yield (first, min(first + step, rows)), [x[low:high] for x in values]


def _slots(counts: Tensor, columns: int) -> Tensor:
    """Lists for ``counts``, of zeros: a kernel may load the first slot of an empty list."""
    width = columns
    if len(counts) * columns > WHOLE:
        width = _width(int(counts.max()), columns)
    return torch.zeros((len(counts), width), dtype=torch.int32, device=counts.device)


def _width(needed: int, room: int) -> int:
    return min(room, 1 << (max(1, needed) - 1).bit_length())
