"""What of a layout no selection changes: made once for a plan, and again when a tensor of the rule does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.coverage import Span, cover, every_tile
from flexsparse.errors import RuleError
from flexsparse.grid import Grid
from flexsparse.kernels.rows import EMPTY, FULL, PARTIAL
from flexsparse.program import FixedTables, MaskProgram


@dataclass(frozen=True, eq=False)
class Ahead:
    """Tables of the rule and offset, and what the rule makes of each tile.

    ``codes [B or 1, Hq or 1, R, C]`` int8 in logical axes: 0 where it allows nothing, 2 where it
    allows every pair that exists, 1 between; None where there is no rule.
    """

    versions: tuple[int, ...]
    tables: FixedTables
    codes: Tensor | None


def look_ahead(
    program: MaskProgram, grid: Grid, block_size: tuple[int, int], device: torch.device
) -> Ahead:
    tables = program.fixed_tables(grid, device)
    codes = None
    if program.rule is not None:
        codes = rule_codes(
            program.of_rule_alone(),
            tables,
            Span(grid.q_len, grid.kv_len, *block_size),
            grid,
            device,
        )
    return Ahead(program.versions(grid), tables, codes)


def rule_codes(
    program: MaskProgram, tables: FixedTables, span: Span, grid: Grid, device: torch.device
) -> Tensor:
    batch = grid.batch if program.uses_batch else 1
    heads = program.address.heads if program.uses_head else 1
    tiles = every_tile(batch, heads, span, device)
    with naming(program):
        covered = cover(program.mod(program.tables(tables)), tiles, span)
    some = torch.where(covered.visible > 0, PARTIAL, EMPTY)
    return torch.where(covered.full, FULL, some).to(torch.int8).view(batch, heads, *span.tiles)


@contextmanager
def naming(program: MaskProgram) -> Iterator[None]:
    """Gives what a rule does wrong at some position the rule's name."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        divides = "ZeroDivision" in str(error)
        if not divides and not isinstance(error, IndexError):
            raise
        name = program.rule.name if program.rule else "the mask"
        what = "divides by zero" if divides else "reads a table past its end"
        raise RuleError(f"{name} {what}: {error}") from error
