"""What of a layout no selection changes: made once for a plan, and again when a tensor of the rule does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.arguments import Empty
from flexsparse.coverage import Span
from flexsparse.device import lasting
from flexsparse.grid import Grid
from flexsparse.intervals import rule_codes, rule_lists
from flexsparse.occupancy import list_axes, on_device_only
from flexsparse.program import FixedTables, MaskProgram
from flexsparse.tracing import naming
from flexsparse.versions import Versions


class Element(NamedTuple):
    """What one key costs: its head dims and the bytes of a number."""

    head_dim: int = 128
    v_head_dim: int = 128
    itemsize: int = 2


class Terms(NamedTuple):
    """All that is decided about a kind of layout. ``columns`` is the room for the rows of a column,
    None for all there are, 0 where nobody asks for lists by column."""

    program: MaskProgram
    grid: Grid
    block_size: tuple[int, int]
    device: torch.device
    empty: Empty = "zero"
    sanitize: bool = False
    element: Element = Element()
    columns: int | None = None

    @property
    def span(self) -> Span:
        return Span(self.grid.q_len, self.grid.kv_len, *self.block_size)

    @property
    def asks_queries(self) -> bool:
        """Whether single queries and keys decide, so that pairs have to be evaluated."""
        return self.program.reach is not None or self.empty == "error" or self.sanitize


@dataclass(frozen=True, eq=False)
class Ahead:
    """Tables of the rule and offset, and what the rule makes of each tile.

    Without a selection that is the whole layout: ``lists`` of torch's, in kernel coordinates. Beside
    one it is ``codes [B or 1, Hq or 1, R, C]`` in logical axes; None where every tile is full.
    """

    versions: Versions
    tables: FixedTables
    codes: Tensor | None
    lists: list[Tensor] | None


@lasting
def look_ahead(terms: Terms) -> Ahead:
    program, grid, span, device = terms.program, terms.grid, terms.span, terms.device
    # Read first: a change from here on is one that these tiles do not know of.
    versions = program.versions(grid)
    tables = program.fixed_tables(grid, device)
    codes = lists = None
    if program.member is None and not on_device_only(device):
        axes = list_axes(program, grid, None)
        # Which keys nobody sees is read by column.
        by_column = terms.columns != 0 or terms.sanitize
        with naming(program.rule):
            read = program.tables(tables)
            lists = rule_lists(program, read, grid, span, axes, device, by_column=by_column)
    elif program.rule is not None and not terms.asks_queries:
        codes = rule_codes(program.of_rule_alone(), tables, grid, span, device)
    return Ahead(versions, tables, codes, lists)
