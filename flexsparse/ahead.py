"""What of a layout no selection changes: made once for a plan, and again when a tensor of the rule does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexsparse.arguments import Empty
from flexsparse.coverage import Span
from flexsparse.cutting import Cuts
from flexsparse.device import lasting
from flexsparse.grid import Grid
from flexsparse.intervals import rule_codes, rule_lists
from flexsparse.kernels.columns import Room
from flexsparse.occupancy import kernel_span, list_axes, logical_span, on_device_only
from flexsparse.program import FixedTables, MaskProgram
from flexsparse.tracing import naming
from flexsparse.versions import Versions


class Element(NamedTuple):
    """What one key costs: its head dims and the bytes of a number. Not ``given`` where no tensor said so:
    then that of most language models."""

    head_dim: int = 128
    v_head_dim: int = 128
    itemsize: int = 2
    given: bool = False


class Terms(NamedTuple):
    """All that is decided about a kind of layout. ``columns`` is the room for the rows of a column,
    None for all there are, 0 where nobody asks for lists by column; ``cuts``, which rows and columns are
    cut into pieces."""

    program: MaskProgram
    grid: Grid
    block_size: tuple[int, int]
    device: torch.device
    empty: Empty = "zero"
    sanitize: bool = False
    element: Element = Element()
    columns: Room | Literal[0] | None = None
    cuts: Cuts | None = None

    @property
    def span(self) -> Span:
        return kernel_span(self.program.address, self.grid, self.block_size)

    @property
    def logical_span(self) -> Span:
        return logical_span(self.program.address, self.grid, self.block_size)

    @property
    def asks_queries(self) -> bool:
        """Whether single queries and keys decide, so that pairs have to be evaluated."""
        return self.program.reach is not None or self.empty == "error" or self.sanitize

    @property
    def moves(self) -> bool:
        """Whether positions can be advanced in place: the offset is a tensor of the device, and
        neither gradients nor single queries are asked about."""
        offset = self.grid.q_offset
        here = isinstance(offset, Tensor) and offset.device == self.device
        settled = self.asks_queries or self.program.ordered
        return here and self.columns == 0 and not settled


@dataclass(frozen=True, eq=False)
class Ahead:
    """Tables of the rule and offset, and what the rule makes of each tile.

    Without a selection that is the whole layout: ``lists`` of torch's, in kernel coordinates. Beside
    one, or where rows of tiles hold several heads, it is ``codes [B or 1, Hq or Hkv or 1, R, C]`` in
    logical axes; None where every tile is full.

    Once positions have advanced there is ``past``, 0-d bool, whether any would have left the keys or
    come before ``lowest``; the tensors then stay the same ones, as a captured graph may read and write
    them.
    """

    versions: Versions
    tables: FixedTables
    codes: Tensor | None
    lists: list[Tensor] | None
    past: Tensor | None = None
    lowest: int = 0

    def renewed(self, new: Ahead) -> Ahead:
        """What ``new`` holds; in the tensors of this one, once positions have advanced."""
        if self.past is None:
            return new
        for mine, theirs in zip(self._tensors, new._tensors, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)
        return replace(self, versions=new.versions)

    @property
    def _tensors(self) -> list[Tensor]:
        codes = [] if self.codes is None else [self.codes]
        return [*self.tables.offset, *self.tables.rule, *codes, *(self.lists or ())]


@lasting
def look_ahead(terms: Terms) -> Ahead:
    program, grid, device = terms.program, terms.grid, terms.device
    address = program.address
    # Read first: a change from here on is one that these tiles do not know of.
    versions = program.versions(grid)
    tables = program.fixed_tables(grid, device)
    codes = lists = None
    alone = program.member is None and address.rows_per_query == 1
    if alone and not on_device_only(device):
        span = terms.span
        axes = list_axes(program, grid, None)
        # Which keys nobody sees is read by column.
        by_column = terms.columns != 0 or terms.sanitize
        with naming(program.rule):
            read = program.tables(tables)
            lists = rule_lists(program, read, grid, span, axes, device, by_column=by_column)
        if terms.moves:
            # At a later position a row may need any width.
            lists = [_wide(x, span.tiles[1]) if i % 2 else x for i, x in enumerate(lists)]
    elif program.rule is not None and not terms.asks_queries:
        span = terms.logical_span
        if program.ordered and program.member is not None:
            # Which rows a tile holds is not known yet.
            span = span._replace(q_tile=program.member.q_block)
        codes = rule_codes(program.of_rule_alone(), tables, grid, span, device)
        codes = address.codes(codes)
    return Ahead(versions, tables, codes, lists)


def _wide(indices: Tensor, columns: int) -> Tensor:
    missing = columns - indices.shape[-1]
    return torch.nn.functional.pad(indices, (0, missing)) if missing else indices
