"""Queries in parts, so that no tensor of all queries by all keys is ever held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.rules import MaskMod, as_rule
from flexsparse.selection import Selection

if TYPE_CHECKING:
    from flexsparse.selectors.base import Selector

# Entries held at a time: 256 MB of fp32.
ENTRIES = 1 << 26


def query_parts(grid: Grid, step: int, entries_a_query: int) -> Iterator[tuple[slice, Grid]]:
    """Slices of the queries, each a multiple of ``step`` but the last, with the grid of each.

    ``entries_a_query`` is what a computation holds for one query; a part holds about `ENTRIES`.

    >>> [(part, sub.q_offset) for part, sub in query_parts(Grid(5, 5), 2, ENTRIES)]
    [(slice(0, 2, None), 0), (slice(2, 4, None), 2), (slice(4, 5, None), 4)]
    """
    rows = max(1, ENTRIES // max(1, entries_a_query) // step) * step
    for start in range(0, grid.q_len, rows):
        stop = min(start + rows, grid.q_len)
        yield (
            slice(start, stop),
            Grid(stop - start, grid.kv_len, q_offset=grid.q_offset + start, batch=grid.batch),
        )


def best_in_parts(
    selector: Selector,
    grid: Grid,
    entries_a_query: int,
    score: Callable[[slice, Grid], Tensor],
) -> Selection:
    """The ``keep`` best blocks of each row by ``score(queries, their grid) -> [B, H, R, C]``.

    A score of -inf is never chosen.
    """
    chosen = []
    for part, within in query_parts(grid, selector.q_block, entries_a_query):
        found = score(part, within)
        chosen.append(selector.best(found, found > -torch.inf, within).indices)
    return Selection.from_indices(
        torch.cat(chosen, 2),
        kv_len=grid.kv_len,
        q_len=grid.q_len,
        kv_block=selector.block,
        q_block=selector.q_block,
        out_of_range="drop",
    )


def visible(rule: MaskMod | None, grid: Grid, heads: int, device: torch.device) -> Tensor:
    """bool, broadcasts to ``[B, Hq, Q, S]``: the pairs that the rule shows."""
    ruled = as_rule(rule)
    if ruled is None:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    b = torch.arange(grid.batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    position = grid.positions(device)[:, None, :, None]
    seen: Tensor = ruled(b, h, position, torch.arange(grid.kv_len, device=device))
    return seen


def or_own(met: Tensor, seen: Tensor, grid: Grid) -> Tensor:
    """How often each query meets each key ``[B, H, n, S]``; who meets none that is ``seen`` meets its own."""
    key = torch.arange(grid.kv_len, device=met.device)
    itself = grid.positions(met.device)[:, None, :, None] == key
    alone = ~(met > 0).any(-1, keepdim=True)
    return torch.where(alone & itself & seen, 1.0, met)
