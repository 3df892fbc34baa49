"""A layout brought up to date in its own tensors, so that a captured graph that reads them sees it.

Where candidates alone decide, only the rows of tiles that changed are written: that costs their
candidates. Lists by column, where there are any, are turned as a whole, and so is a layout whose
single queries decide (a fallback, ``empty="error"``, ``sanitize``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flexsparse.ahead import Ahead, Terms
from flexsparse.building import geometry_of, lists_for, make, versions_of
from flexsparse.device import lasting
from flexsparse.errors import ArgumentError, LayoutError, ShapeError
from flexsparse.kernels import membership
from flexsparse.kernels.columns import column_tiles
from flexsparse.kernels.geometry import Geometry
from flexsparse.kernels.rows import RowTiles, no_words, rewrite
from flexsparse.kernels.tile_bits import tile_bits
from flexsparse.layout import Layout
from flexsparse.selection import Selection
from flexsparse.shapes import ceil_div

Rows = Tensor | range


@lasting
def update(
    layout: Layout, terms: Terms, select: Selection | None, ahead: Ahead, rows: Rows | None = None
) -> None:
    """Makes ``layout`` that of ``select``; ``rows`` of the selection are all that differ, by default any.

    ``layout`` is one of the same terms.
    """
    if select is None or terms.asks_queries or terms.program.ordered:
        _copy(layout, make(terms, select, ahead))
    else:
        _convert(layout, terms, select, ahead, rows)
    if layout.launches is not None:
        both = (tree_leaves(x.launches) for x in (layout, layout.cut(layout.cuts)))
        _copy_all(*([t for t in leaves if t is not None] for leaves in both))
    object.__setattr__(layout, "select", select)
    layout.writes.count()
    object.__setattr__(layout, "read", ahead.versions)
    object.__setattr__(layout, "versions", versions_of(ahead, select).and_of(layout.writes))


def check_rows(rows: Rows, select: Selection, device: torch.device) -> None:
    """Rows of a selection, by a range or an int tensor ``[n]`` in which -1 is none."""
    if isinstance(rows, range):
        outside = len(rows) > 0 and (min(rows) < 0 or max(rows) >= select.rows)
    elif isinstance(rows, Tensor) and rows.dtype in (torch.int32, torch.int64) and rows.ndim == 1:
        if rows.device != device:
            raise ShapeError(f"rows are on {rows.device} but the plan on {device}: move them")
        # Elsewhere the host does not look.
        outside = device.type == "cpu" and bool(((rows < -1) | (rows >= select.rows)).any())
    else:
        given = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise ArgumentError(f"rows must be a range or an int tensor [n], got {given}")
    if outside:
        raise LayoutError(
            f"rows must lie among the {select.rows} rows of the selection, got {rows}: name the rows "
            "of queries whose candidates changed"
        )


def check_room(layout: Layout, terms: Terms, select: Selection | None) -> None:
    """Refuses a selection whose rows may need more tiles than ``layout`` has room for."""
    if select is None:
        return
    candidates, room = select.shape[-1], layout.kv_indices.shape[-1]
    need = geometry_of(terms, select).row_capacity(candidates)
    if need > room:
        raise LayoutError(
            f"this layout has room for {room} tiles a row, but {candidates} candidates may need {need}: "
            "make the layout anew, with plan.layout(select)"
        )


def _convert(
    layout: Layout, terms: Terms, select: Selection, ahead: Ahead, rows: Rows | None
) -> None:
    """Candidates to tiles, into the lists of the layout."""
    program, span = terms.program, terms.span
    check_room(layout, terms, select)
    g = geometry_of(terms, select)
    codes = None if ahead.codes is None else (ahead.codes.shape[0], ahead.codes.shape[1])
    at = None if rows is None else _tile_rows(rows, g, terms.device)
    asks = program.asks_member(terms.block_size)
    words = layout.tables[program.words_at] if asks else no_words(select.indices)
    columns = layout.columns
    bits = select.indices.new_empty(0)
    if columns is not None and at is None:
        bits = bits.new_empty((2, *layout.kv_num_blocks.shape, ceil_div(span.tiles[1], 32)))
    into = RowTiles(
        layout.kv_num_blocks,
        layout.kv_indices,
        layout.full_kv_num_blocks,
        layout.full_kv_indices,
        bits,
        words,
    )
    lists = lists_for(terms, select, codes)
    rewrite(select.indices, select.candidates, ahead.codes, g, lists, into, at)
    if rows is not None and asks:
        _rewrite_words(words, select, rows)
    _copy_all(layout.tables, program.tables(ahead.tables, words))
    if columns is not None:
        bits = bits if at is None else tile_bits(layout.lists[:4], span.tiles[1])
        made = column_tiles(bits, span.tiles[1], columns.room)
        assert columns.real is not None and made.real is not None
        _copy_all((*columns[:4], columns.real), (*made[:4], made.real))


def _tile_rows(rows: Rows, g: Geometry, device: torch.device) -> Tensor:
    """``[n]``: the rows of tiles that rows of the selection meet, some perhaps repeatedly."""
    if isinstance(rows, range):
        if not rows:
            return torch.arange(0, device=device)
        last = min((max(rows) + 1) * g.q_block, g.q_len) - 1
        return torch.arange(min(rows) * g.q_block // g.q_tile, last // g.q_tile + 1, device=device)
    # Whoever names no row has the first done again.
    row = rows.to(torch.int64).clamp(min=0, max=ceil_div(g.q_len, g.q_block) - 1)[:, None]
    last_tile = (((row + 1) * g.q_block).clamp(max=g.q_len) - 1) // g.q_tile
    at = row * g.q_block // g.q_tile + torch.arange(g.tiles_per_row, device=device)
    return at.minimum(last_tile).flatten()


def _rewrite_words(words: Tensor, select: Selection, rows: Rows) -> None:
    """The lines of membership words in which ``rows`` stand, from their candidates."""
    size = membership.WORD
    device = words.device
    if isinstance(rows, range):
        ends = (min(rows) // size, max(rows) // size + 1) if rows else (0, 0)
        lines = torch.arange(*ends, device=device)
    else:
        lines = rows.to(torch.int64).clamp(min=0, max=select.rows - 1) // size
    row = lines[:, None] * size + torch.arange(size, device=device)
    chosen = select.indices[:, :, row.clamp(max=select.rows - 1).flatten()]
    chosen = torch.where((row < select.rows).flatten()[:, None], chosen, -1)
    words.index_copy_(2, lines, membership.pack(chosen, select.candidates))


def _copy(layout: Layout, made: Layout) -> None:
    columns = layout.columns
    # The plan's columns may have come to have more room since, or less.
    if columns is not None and (made.columns is None or made.columns.room != columns.room):
        made = made.with_columns(columns.room)
    for old, new in zip(layout.lists, made.lists, strict=True):
        if old.ndim == 4 and new.shape[-1] > old.shape[-1]:
            raise LayoutError(
                f"this layout has room for {old.shape[-1]} tiles a row, but {new.shape[-1]} are needed: "
                "make the layout anew, with plan.layout"
            )
    _copy_all(_tensors(layout), _tensors(made))
    if layout.columns is not None and layout.columns.real is not None:
        assert made.columns is not None
        _copy_all([layout.columns.real], [made.columns.degrees])


def _tensors(layout: Layout) -> Iterator[Tensor]:
    yield from layout.lists
    yield from layout.tables
    yield from layout.order or ()
    yield from (t for t in (layout.has_empty_row, layout.seen_keys) if t is not None)


def _copy_all(into: Iterable[Tensor], made: Iterable[Tensor]) -> None:
    """Copies tensors that are not the same memory; slots that the new lists do not have hold 0."""
    for old, new in zip(into, made, strict=True):
        if old.data_ptr() == new.data_ptr():
            continue
        if old.shape != new.shape:
            new = torch.nn.functional.pad(new, (0, old.shape[-1] - new.shape[-1]))
        for axis, stride in enumerate(old.stride()):
            if stride == 0 and old.shape[axis] > 1:
                old, new = old.narrow(axis, 0, 1), new.narrow(axis, 0, 1)
        old.copy_(new)
