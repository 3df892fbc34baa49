"""Some rows of a plan's queries as a plan of their own: cut out of what is known, not found again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from torch import Tensor

from flexsparse.ahead import Ahead, Terms
from flexsparse.building import assembled, by_column, make
from flexsparse.device import lasting
from flexsparse.errors import ArgumentError, LayoutError
from flexsparse.grid import Grid
from flexsparse.kernels import membership
from flexsparse.kernels.columns import Room, column_tiles
from flexsparse.kernels.rows import no_words
from flexsparse.kernels.tile_bits import tile_bits
from flexsparse.layout import Layout
from flexsparse.program import offset_kind
from flexsparse.selection import Selection
from flexsparse.shapes import ceil_div


def check_chunk(terms: Terms, start: int, stop: int) -> None:
    """Refuses rows that are not whole tiles, and whole rows of the selection."""
    for name, value in (("start", start), ("stop", stop)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"chunk {name} must be an int, got {value!r}")
    if terms.program.ordered:
        raise LayoutError(
            "a plan with cluster=True lays rows in an order of its own, from which no chunk can be cut: "
            "make the plan with cluster=False"
        )
    q_len, member = terms.grid.q_len, terms.program.member
    unit = math.lcm(terms.logical_span.q_tile, 1 if member is None else member.q_block)
    whole = start % unit == 0 and (stop % unit == 0 or stop == q_len)
    if not (0 <= start < stop <= q_len and whole):
        raise LayoutError(
            f"chunk needs start and stop in multiples of {unit} within 0..{q_len}, the last stop being "
            f"{q_len}, got {start} and {stop}: its rows are whole tiles and whole rows of the selection; a plan with a smaller tile= "
            "allows finer chunks"
        )


@lasting
def chunk_terms(terms: Terms, start: int, stop: int) -> Terms:
    """The terms of queries ``start..stop``; an offset that is a tensor is copied."""
    whole = terms.grid
    grid = Grid(stop - start, whole.kv_len, q_offset=whole.q_offset + start, batch=whole.batch)
    program = replace(terms.program, offset=offset_kind(grid))
    # How many rows of a few visit a column was not measured.
    columns: Literal[0] | None = 0 if terms.columns == 0 else None
    return terms._replace(program=program, grid=grid, columns=columns, cuts=None)


@lasting
def chunk_ahead(ahead: Ahead, terms: Terms, start: int) -> Ahead:
    """What is ahead of a chunk with ``terms`` that begins at query ``start``."""
    offset = terms.program.fixed_tables(terms.grid, terms.device).offset
    codes = None if ahead.codes is None else _cut(ahead.codes, terms, start)
    lists = None
    if ahead.lists is not None:
        lists = [_cut(x, terms, start) for x in ahead.lists[:4]]
        if len(ahead.lists) > 4:
            rows, columns = terms.span.tiles
            lists += column_tiles(tile_bits(lists, columns), columns, Room(rows, rows))[:4]
    return Ahead(ahead.versions, ahead.tables._replace(offset=offset), codes, lists)


@lasting
def chunk_layout(layout: Layout, terms: Terms, ahead: Ahead, start: int) -> Layout:
    """The rows of ``layout`` that a chunk with ``terms`` has, from query ``start`` on; outdated once that
    is written anew.

    Where single queries decide (a fallback, ``empty="error"``, ``sanitize``) its pairs are asked anew.
    """
    cut = _cut_out(layout, terms, ahead, start)
    return replace(cut, versions=cut.versions.and_of(layout.writes))


def _cut_out(layout: Layout, terms: Terms, ahead: Ahead, start: int) -> Layout:
    program, grid, select = terms.program, terms.grid, layout.select
    if select is not None:
        first = start // select.q_block
        rows = slice(first, first + ceil_div(grid.q_len, select.q_block))
        indices = select.indices[:, :, rows].contiguous()
        select = Selection._whole(indices, grid.q_len, grid.kv_len, select.q_block, select.kv_block)
    if terms.asks_queries:
        return make(terms, select, ahead)
    words = None
    if select is not None:
        asks = program.asks_member(terms.block_size)
        chosen = select.indices
        words = membership.pack(chosen, select.candidates) if asks else no_words(chosen)
    by_row = [_cut(x, terms, start) for x in layout.by_row]
    columns = None
    if terms.columns != 0:
        columns = by_column(terms, tile_bits(by_row, terms.span.tiles[1]))
    tables = program.tables(ahead.tables, words)
    return assembled(terms, ahead, select, tables, by_row, columns)


def _cut(by_row: Tensor, terms: Terms, start: int) -> Tensor:
    """The chunk's rows of tiles of ``[B, H, R, …]``."""
    first = start // terms.logical_span.q_tile
    return by_row[:, :, first : first + terms.span.tiles[0]].contiguous()
