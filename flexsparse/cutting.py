"""Rows and columns of tiles that are longer than the others, cut into pieces that other programs walk.

The pieces of rows are a launch of their own, over their queries taken once more; what they find is merged
by lse. The pieces of columns, walked for the gradients of keys and values, stand ahead of all columns of
the launch of whole rows, over their keys taken once more; what they give is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.kernels.columns import ColumnTiles, Room, column_tiles, moved, side_by_side
from flexsparse.kernels.cut import Laid, Pieces, cut_lists
from flexsparse.kernels.tile_bits import tile_bits


class Cuts(NamedTuple):
    """Rows of more than ``row`` tiles are cut into pieces, for which each list has ``row_slots``; columns
    likewise. 0 slots where none are cut."""

    row: int
    row_slots: int
    column: int = 0
    column_slots: int = 0


class Slots(NamedTuple):
    """Where pieces stand: of each number of a launch its ``place`` among rows or keys, of the pieces alone
    and of all that the launch holds; the list of each slot, and how many pieces begin there."""

    place: Tensor
    laid: Tensor
    owner: Tensor
    parts: Tensor


class Launches(NamedTuple):
    """``whole``: the lists of rows that are not cut, by row and perhaps by column, in torch's order;
    ``pieces``: those of the pieces, if rows are cut. ``trained`` are those of the whole rows beside the
    pieces of columns, if these are cut."""

    whole: list[Tensor]
    pieces: list[Tensor]
    rows: Slots | None
    trained: list[Tensor]
    columns: Slots | None

    def to(self, device: torch.device | str) -> Launches:
        rows, columns = (s and Slots(*(t.to(device) for t in s)) for s in (self.rows, self.columns))
        whole, pieces, trained = (
            [*(t.to(device) for t in lists[:4]), *moved(lists[4:], device)]
            for lists in (self.whole, self.pieces, self.trained)
        )
        return Launches(whole, pieces, rows, trained, columns)


def launches_of(
    lists: Sequence[Tensor], columns: ColumnTiles | None, cuts: Cuts, span: Span
) -> Launches:
    """A layout of four lists by row, and perhaps by column, as launches; on the device alone."""
    whole, pieces, rows = list(lists), [], None
    if cuts.row_slots:
        cut = cut_lists(lists, cuts.row, cuts.row_slots, Laid(span.q_tile, span.q_len))
        whole, pieces = _rest(lists, cut), cut.lists
        rows = Slots(cut.place, cut.place, cut.owner, cut.parts)
    if columns is None:
        return Launches(whole, pieces, rows, [], None)
    by_column = list(columns[:4])
    if rows is not None:
        by_column = _turned(whole, span, columns.room)
        # A tile stands in one piece: no more of them visit a column than rows did.
        room = Room(*(min(cuts.row_slots, n) for n in columns.room))
        pieces = [*pieces, *_turned(pieces, span, room)]
    if not cuts.column_slots:
        return Launches([*whole, *by_column], pieces, rows, [], None)
    trained, keys = _columns_cut(whole, by_column, cuts, span)
    return Launches([*whole, *by_column], pieces, rows, trained, keys)


def _rest(lists: Sequence[Tensor], cut: Pieces) -> list[Tensor]:
    return [cut.partial_num, lists[1], cut.full_num, lists[3]]


def _turned(lists: Sequence[Tensor], span: Span, room: Room) -> list[Tensor]:
    """The same tiles by column."""
    columns = span.tiles[1]
    return list(column_tiles(tile_bits(lists, columns), columns, room)[:4])


def _columns_cut(
    whole: Sequence[Tensor], by_column: Sequence[Tensor], cuts: Cuts, span: Span
) -> tuple[list[Tensor], Slots]:
    slots = cuts.column_slots
    # The end of the keys must stay the end: what is past it is known by its place.
    ragged = span.kv_len % span.kv_tile != 0
    laid = Laid(span.kv_tile, span.kv_len)
    cut = cut_lists(by_column, cuts.column, slots, laid, but_last=ragged)
    rest = _rest(by_column, cut)
    found = [x if i % 2 == 0 else x + slots for i, x in enumerate(whole)]
    joined = []
    for i, (piece, own) in enumerate(zip(cut.lists, rest, strict=True)):
        if i % 2:
            # Of neither kind does a piece hold more than its list.
            missing = own.shape[-1] - piece.shape[-1]
            piece = torch.nn.functional.pad(piece, (0, missing))
        joined.append(torch.cat([piece, own], 2).contiguous())
    partial_num, partial_idx, full_num, full_idx = joined
    partial_idx, full_idx = side_by_side(partial_idx, full_idx)
    found += [partial_num, partial_idx, full_num, full_idx]
    keys = torch.arange(span.kv_len, dtype=torch.int32, device=cut.place.device)
    all_laid = torch.cat([cut.place, keys.expand(*cut.place.shape[:2], -1)], 2)
    return found, Slots(cut.place, all_laid, cut.owner, cut.parts)
