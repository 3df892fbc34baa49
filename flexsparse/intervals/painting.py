"""Runs of tiles as a map: a code a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.intervals.runs import RuleTiles
from flexsparse.kernels.rows import FULL, PARTIAL


def painted(tiles: RuleTiles) -> Tensor:
    """int8 ``[B, H, R, C]``: 0 where nothing is allowed, 1 where some pairs are, 2 where all are."""
    rows, columns = tiles.span.tiles
    # Each run adds its code where it begins and takes it back past its end.
    edges = torch.zeros(
        (tiles.lists[0] * tiles.lists[1] * rows, columns + 1),
        dtype=torch.int8,
        device=tiles.full.row.device,
    )
    for runs, code in ((tiles.partial, PARTIAL), (tiles.full, FULL)):
        step = torch.full_like(runs.row, code, dtype=torch.int8)
        edges.index_put_((runs.row, runs.first), step, accumulate=True)
        edges.index_put_((runs.row, runs.stop), -step, accumulate=True)
    codes = edges.cumsum(1, dtype=torch.int8)[:, :columns]
    return codes.contiguous().view(*tiles.lists, rows, columns)
