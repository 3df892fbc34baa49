"""What a rule makes of each tile, as a map: beside a selection every tile may be asked about."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.coverage import Span, cover, every_tile
from flexsparse.grid import Grid
from flexsparse.intervals.finding import MAPPED, found_tiles, tile_map
from flexsparse.intervals.fused import fused_judge
from flexsparse.intervals.painting import painted
from flexsparse.intervals.refine import rule_tiles
from flexsparse.kernels.rows import EMPTY, FULL, PARTIAL
from flexsparse.occupancy import on_device_only
from flexsparse.program import FixedTables, MaskProgram
from flexsparse.tracing import naming


def rule_codes(
    program: MaskProgram, tables: FixedTables, grid: Grid, span: Span, device: torch.device
) -> Tensor:
    """int8 ``[B or 1, Hq or 1, R, C]`` of a program without selection, in its own coordinates.

    0 where the rule allows nothing, 2 where it allows every pair that exists, 1 between. Where the
    host must not look every pair is evaluated.
    """
    batch = program.address.kernel_batch(grid.batch) if program.uses_batch else 1
    heads = program.address.kernel_heads[0] if program.uses_head else 1
    lists = (batch, heads)
    read = program.tables(tables)
    with naming(program.rule):
        if not on_device_only(device):
            judge = fused_judge(program, read, span, lists, device)
            if judge is None:
                return painted(rule_tiles(program, read, grid, span, lists, device))
            mask = program.mod(read)
            return (
                tile_map(judge, mask)
                if judge.tiles <= MAPPED
                else painted(found_tiles(judge, mask))
            )
        covered = cover(program.mod(read), every_tile(*lists, span, device), span)
    some = torch.where(covered.visible > 0, PARTIAL, EMPTY)
    return torch.where(covered.full, FULL, some).to(torch.int8).view(*lists, *span.tiles)
