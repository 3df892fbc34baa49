"""Which blocks of keys the queries of a row stand in, and which have begun by then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.kernels.parts import rows_at_once


def begun(grid: Grid, q_block: int, block: int, device: torch.device) -> Tensor:
    """bool ``[B or 1, 1, R, C]``: blocks that begin no later than the row's last query stands.

    >>> begun(Grid(4, 4), 2, 1, torch.device("cpu")).int()[0, 0].tolist()
    [[1, 1, 0, 0], [1, 1, 1, 1]]
    """
    _, last = _ends(grid, q_block, device)
    _, blocks = grid.shape(q_block, block)
    return torch.arange(blocks, device=device) * block <= last


def nearest(
    grid: Grid, q_block: int, block: int, device: torch.device, *, first: int = 0, local: int = 1
) -> Tensor:
    """bool ``[B or 1, 1, R, C]``: of each query of a row the own block and the ``local - 1`` before it.

    Moreover the ``first`` blocks of the sequence, as far as they have begun.

    >>> nearest(Grid(4, 4), 2, 1, torch.device("cpu"), local=2).int()[0, 0].tolist()
    [[1, 1, 0, 0], [0, 1, 1, 1]]
    """
    ends = _ends(grid, q_block, device)
    low, high = (torch.div(end, block, rounding_mode="floor") for end in ends)
    column = torch.arange(grid.shape(q_block, block)[1], device=device)
    return ((column < first) | (column > low - local)) & (column <= high)


def by_rows(q: Tensor, q_block: int, width: int, part: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """``part(queries, their slice)`` over a few rows of queries at once, joined along rows.

    ``width``: how many numbers ``part`` makes for each query and head; so scores of every query
    are never there together.
    """
    batch, heads, length, _ = q.shape
    step = rows_at_once(q.device.type, batch * heads * q_block * width) * q_block
    slices = [slice(at, min(at + step, length)) for at in range(0, length, step)]
    return torch.cat([part(q[:, :, here], here) for here in slices], 2)


def exactly(x: Tensor) -> Tensor:
    """At least fp32: what ranks candidates is not left to half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _ends(grid: Grid, q_block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[B or 1, 1, R, 1]`` each: where the first and the last query of each row stand."""
    rows, _ = grid.shape(q_block, 1)
    start = torch.arange(rows, device=device) * q_block
    end = (start + q_block - 1).clamp(max=grid.q_len - 1)
    position = grid.positions(device)
    return position[:, None, start, None], position[:, None, end, None]
