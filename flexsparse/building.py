"""How a layout is made: from the selection's own lists, or pair by pair where single queries decide.

Rule and selection meet tile by tile: what the rule makes of each tile is known ahead, so a selection
costs as much as its candidates and no more. Only who is empty (a fallback, ``empty="error"``) and which
keys nobody sees (``sanitize``) take the evaluation of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.ahead import Ahead, Terms, look_ahead
from flexsparse.arguments import (
    Empty,
    Fallback,
    check_device,
    check_empty,
    check_fallback,
    check_flag,
    check_heads,
    check_selection,
    tile_size,
)
from flexsparse.coverage import cover, every_tile
from flexsparse.device import lasting
from flexsparse.errors import ArgumentError, LayoutError
from flexsparse.grid import Grid
from flexsparse.kernels import membership
from flexsparse.kernels.as_given import given_tiles
from flexsparse.kernels.columns import ColumnTiles, Room, column_tiles
from flexsparse.kernels.compress import compress
from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.kernels.rows import EMPTY, FULL, RowTiles, pack_bits, row_tiles
from flexsparse.layout import Layout
from flexsparse.listed import seeing_queries, seen_keys
from flexsparse.occupancy import (
    list_axes,
    near,
    occupancy,
    on_device_only,
    refuse_empty,
    seeing_rows,
    seen_keys_of,
    tile_maps_of,
    tiles_of,
)
from flexsparse.ordering import Order, alike, codes_in_order, in_order, order_of
from flexsparse.program import mask_program
from flexsparse.rules import MaskMod, as_rule
from flexsparse.selection import Selection
from flexsparse.tracing import naming
from flexsparse.versions import Versions, Writes


def build_layout(
    *,
    rule: MaskMod | None = None,
    select: Selection | None = None,
    grid: Grid,
    heads: tuple[int, int],
    block_size: int | tuple[int, int] = (128, 128),
    fallback: Fallback = None,
    empty: Empty = "zero",
    sanitize: bool = False,
    exact: bool = True,
    device: torch.device | str | None = None,
) -> Layout:
    """Rule and selection as tiles, with logical heads as they are.

    ``heads`` is ``(Hq, Hkv)``; ``block_size`` any size from 16 up, ``(query, key)``. The layout lives
    on ``device``, by default the selection's. With ``exact`` no tile is listed in which nothing is
    seen, and none is masked in which everything is: tiles that rule and candidates both cut are then
    evaluated pair by pair. Without, such tiles are masked inside, which computes the same.

    Inside torch.compile, and while a CUDA graph is captured, the host must not look: all of a rule is
    evaluated pair by pair, and a selection takes ``exact=False`` (torch.compile breaks its graph without).
    Build what stays the same outside.
    """
    if not isinstance(grid, Grid):
        raise ArgumentError(f"grid must be a Grid(q_len, kv_len), got {type(grid).__name__}")
    address = Identity(*check_heads(heads))
    if select is not None:
        select = check_selection(select, grid, heads)
    if device is None:
        device = "cpu" if select is None else select.device
    reach, empty = check_fallback(fallback), check_empty(empty)
    tiles = tile_size(block_size, "block_size")
    program = mask_program(address, grid, as_rule(rule), select, reach)
    device = check_device(device)
    terms = Terms(program, grid, tiles, device, empty, check_flag("sanitize", sanitize))
    settles = check_flag("exact", exact) and not terms.asks_queries and select is not None
    if settles and on_device_only(device) and not torch.compiler.is_compiling():
        raise LayoutError(
            "exact=True looks at the tiles that rule and candidates cut, which the host must not do while a "
            "CUDA graph is captured: pass exact=False, which computes the same"
        )
    layout = make(terms, select, look_ahead(terms))
    return settled(layout) if settles else layout


@lasting
def make(terms: Terms, select: Selection | None, ahead: Ahead) -> Layout:
    """The layout of one selection, or of the rule alone."""
    # Who sees anything is asked of lists, whose lengths a graph does not know.
    by_lists = not (terms.asks_queries and on_device_only(terms.device))
    if ahead.lists is not None and by_lists:
        return of_rule(terms, ahead, ahead.lists)
    if terms.asks_queries:
        return by_pairs(terms, select, ahead)
    return from_lists(terms, select, ahead)


def of_rule(terms: Terms, ahead: Ahead, lists: list[Tensor]) -> Layout:
    """The tiles of a rule alone: found ahead, they are the layout."""
    program, grid, span = terms.program, terms.grid, terms.span
    tables = program.tables(ahead.tables)
    axes = (lists[0].shape[0], lists[0].shape[1])
    has_empty_row = keys = None
    mask = program.mod(tables)
    if terms.empty == "error":
        seen = seeing_rows(*seeing_queries(mask, lists, span), axes, span)
        has_empty_row = ~seen.all()
        refuse_empty(seen, program.address, grid)
    if terms.sanitize:
        at, by_tile = seen_keys(mask, lists, span)
        keys = seen_keys_of(at, by_tile, axes, span, program.address)
    columns = ColumnTiles(*lists[4:]) if len(lists) > 4 else None
    return assembled(
        terms, ahead, None, tables, lists[:4], columns, has_empty_row=has_empty_row, seen_keys=keys
    )


def from_lists(terms: Terms, select: Selection | None, ahead: Ahead) -> Layout:
    """Rule and selection met tile by tile, on the device alone."""
    program, span = terms.program, terms.span
    words = order = None
    chosen, codes = select, ahead.codes
    if select is not None and program.ordered:
        order, chosen, codes = laid_in_order(terms, select, codes)
    own = None if codes is None else (codes.shape[0], codes.shape[1])
    lists = lists_for(terms, select, own)
    if chosen is None:
        shape = (1, 1, *span.tiles)
        code = torch.full(shape, FULL, device=terms.device) if codes is None else codes
        maps = maps_of(lists.of(code))
        counts = [*compress(maps[0]), *compress(maps[1])]
        bits = pack_bits(maps)
    else:
        *counts, bits, words = selected_tiles(terms, chosen, codes, lists)
    tables = program.tables(ahead.tables, words, place=None if order is None else order.place)
    columns = by_column(terms, bits) if terms.columns != 0 else None
    return assembled(terms, ahead, select, tables, counts, columns, order=order)


def selected_tiles(terms: Terms, select: Selection, codes: Tensor | None, lists: Lists) -> RowTiles:
    """Tiles of a selection met with the rule's ``codes``: of what was given, where that will do."""
    geometry = geometry_of(terms, select)
    words = terms.program.asks_member(terms.block_size)
    given, candidates = select.given, select.candidates
    if given is not None:
        made = given_tiles(given, candidates, codes, geometry, lists, words=words)
        if made is not None:
            return made
    return row_tiles(select.indices, candidates, codes, geometry, lists, words=words)


def laid_in_order(
    terms: Terms, select: Selection, codes: Tensor | None
) -> tuple[Order, Selection, Tensor | None]:
    """The order of rows, the selection laid so, and what the rule makes of its tiles."""
    rows = alike(select)
    order = order_of(select, rows, terms.program.address, terms.grid.batch)
    if codes is not None:
        codes = codes_in_order(codes, rows, terms.logical_span.q_tile // select.q_block)
    return order, in_order(select, rows), codes


def maps_of(codes: Tensor) -> Tensor:
    """bool ``[2, B, H, R, C]``: the tiles of which a rule allows some pairs, and all."""
    return torch.stack([(codes != EMPTY) & (codes != FULL), codes == FULL])


def geometry_of(terms: Terms, select: Selection) -> Geometry:
    """How the blocks of a selection lie on the tiles."""
    span = terms.logical_span
    # One row of candidates stands for all queries, as a block over every row of tiles does.
    q_block = span.tiles[0] * span.q_tile if select.rows == 1 else select.q_block
    return Geometry(*span[:2], q_block, select.kv_block, *span[2:])


def assembled(
    terms: Terms,
    ahead: Ahead,
    select: Selection | None,
    tables: list[Tensor],
    by_row: Sequence[Tensor],
    columns: ColumnTiles | None,
    *,
    has_empty_row: Tensor | None = None,
    seen_keys: Tensor | None = None,
    order: Order | None = None,
) -> Layout:
    """What was found, as a layout; ``by_row`` are counts and indices of partial tiles, then of full."""
    address, writes = terms.program.address, Writes()
    made = Layout(
        grid=terms.grid,
        heads=(address.heads, address.kv_heads),
        block_size=terms.block_size,
        address=address,
        program=terms.program,
        tables=tables,
        kv_num_blocks=by_row[0],
        kv_indices=by_row[1],
        full_kv_num_blocks=by_row[2],
        full_kv_indices=by_row[3],
        columns=columns,
        has_empty_row=has_empty_row,
        seen_keys=seen_keys,
        select=select,
        element=terms.element,
        read=ahead.versions,
        versions=versions_of(ahead, select).and_of(writes),
        writes=writes,
        order=order,
    )
    return made if terms.cuts is None else made.cut(terms.cuts)


def by_column(terms: Terms, bits: Tensor) -> ColumnTiles:
    """The lists by column, with the room that the terms give them."""
    rows, columns = terms.span.tiles
    return column_tiles(bits, columns, terms.columns or Room(rows, rows))


def lists_for(terms: Terms, select: Selection | None, codes: tuple[int, int] | None) -> Lists:
    address, grid = terms.program.address, terms.grid
    batch, heads = address.kernel_batch(grid.batch), address.kernel_heads[0]
    made_from = [codes or (1, 1)]
    if select is not None:
        made_from.append((select.batch, select.heads))
    # A head of the kernel has a list of its own where its logical heads differ: folded KV heads
    # are entries of the batch, and only what differs inside a group stays a head.
    own_batch = address.fold > 1 or any(b > 1 for b, _ in made_from)
    own_heads = any(h > address.fold for _, h in made_from)
    return Lists(batch if own_batch else 1, heads if own_heads else 1, address.fold, address.heads)


def versions_of(ahead: Ahead, select: Selection | None) -> Versions:
    """Of all that the tiles depend on: of candidates too, unless a graph is to see them change."""
    if select is None or on_device_only(select.device):
        return ahead.versions
    return ahead.versions.and_of(select.held)


@lasting
def settled(layout: Layout) -> Layout:
    """The layout without tiles in which nothing is seen, and those wholly seen among the full."""
    partial, full = layout.tile_maps()
    tiles = partial.nonzero()
    covered = cover(layout.mask_mod, tiles, layout.span)
    lists = (partial.shape[0], partial.shape[1])
    some, whole = tile_maps_of(tiles, covered, lists, layout.span)
    full = full | whole
    kv_num_blocks, kv_indices = compress(some)
    full_kv_num_blocks, full_kv_indices = compress(full)
    rows, columns = layout.span.tiles
    return replace(
        layout,
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        columns=column_tiles(pack_bits(torch.stack([some, full])), columns, Room(rows, rows)),
    )


def by_pairs(terms: Terms, select: Selection | None, ahead: Ahead) -> Layout:
    """Every pair of the touched tiles evaluated: who sees anything, and what anybody sees."""
    program, grid, span, device = terms.program, terms.grid, terms.span, terms.device
    address = program.address
    words = occupied = nothing_seen = None
    if select is not None:
        words = membership.pack(select.indices, select.candidates)
        occupied = address.lists(occupancy(select, terms.logical_span), grid.batch)
    lists = list_axes(program, grid, occupied)
    if program.reach is not None and occupied is not None:
        # Who is empty without the fallback decides where the fallback counts.
        start = torch.zeros((*lists, grid.q_len), dtype=torch.bool, device=device)
        base = program.before_fallback(program.tables(ahead.tables, words, start))
        tiles = tiles_of(occupied.expand(*lists, *span.tiles))
        with naming(program.rule):
            queries = cover(base, tiles, span).queries
        nothing_seen = ~seeing_rows(tiles, queries, lists, span)
        occupied = occupied | near(nothing_seen, address, grid, program.reach, span)
    tables = program.tables(ahead.tables, words, nothing_seen)
    if occupied is None:
        tiles = every_tile(*lists, span, device)
    else:
        tiles = tiles_of(occupied.expand(*lists, *span.tiles))
    with naming(program.rule):
        covered = cover(program.mod(tables), tiles, span)
    maps = torch.stack(tile_maps_of(tiles, covered, lists, span))
    has_empty_row = None
    if terms.empty == "error":
        seen = seeing_rows(tiles, covered.queries, lists, span)
        has_empty_row = ~seen.all()
        if not on_device_only(device):
            refuse_empty(seen, address, grid)
    keys = seen_keys_of(tiles, covered.keys, lists, span, address) if terms.sanitize else None
    by_row = [*compress(maps[0]), *compress(maps[1])]
    columns = by_column(terms, pack_bits(maps)) if terms.columns != 0 else None
    return assembled(
        terms, ahead, select, tables, by_row, columns, has_empty_row=has_empty_row, seen_keys=keys
    )
