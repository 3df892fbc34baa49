"""How long the rows and columns of tiles of a layout are, and from which length on they are cut.

One program walks a row forward, and a column in the backward. Programs begin in no order of length, so
the last to begin may be the longest: that long all others wait.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.backends import Backend, Call
from flexsparse.backends.pieces import of_pieces
from flexsparse.cost import moved_ms, step_ms
from flexsparse.cutting import Cuts
from flexsparse.device import ceilings
from flexsparse.errors import BackendError
from flexsparse.layout import Layout
from flexsparse.occupancy import on_device_only
from flexsparse.rates import CUTTING
from flexsparse.shapes import ceil_div

# Who runs pieces, and who is known to run them in less time than the rows take that they are of.
WALKING = ("tiles", "flex", "flash")
GAINING = ("flex",)
# Lengths to cut at, in those of the mean list.
_TIMES = (1, 2, 4, 8, 16, 32)
# Slots for pieces, beside the most that any list needed, and rows that no kernel takes for decoding.
_ROOM = 1.5
_LEAST_ROWS = 128


class Lengths(NamedTuple):
    """Of lists: their tiles in all and the longest; and by length to cut ``at``, the most ``slots`` that
    the lists of a head need and the tiles in all that are ``cut``."""

    tiles: int
    longest: int
    at: tuple[int, ...]
    slots: tuple[int, ...]
    cut: tuple[int, ...]


def lengths_of(numbers: Tensor, at: tuple[int, ...] | None = None) -> Lengths:
    """Of lists of so many tiles ``[B, H, n]``, cut at ``at``, by default multiples of the mean. Reads the
    device once."""
    numbers = numbers.to(torch.int64)
    if at is None:
        mean = (numbers.sum() + numbers.numel() - 1) // max(1, numbers.numel())
        cuts = mean.clamp(min=1) * torch.tensor(_TIMES, device=numbers.device)
    else:
        cuts = torch.tensor(at, device=numbers.device)
    each = cuts.view(-1, 1, 1, 1)
    longer = numbers > each
    pieces = torch.where(longer, (numbers + each - 1) // each, 0).sum(-1)
    tiles = torch.where(longer, numbers, 0).sum((1, 2, 3))
    read = [numbers.sum()[None], numbers.amax()[None], cuts]
    read += [pieces.amax((1, 2)), tiles]
    found: list[int] = torch.cat(read).tolist()
    n = len(cuts)
    parts = [tuple(found[2 + i * n : 2 + (i + 1) * n]) for i in range(3)]
    return Lengths(found[0], found[1], *parts)


def choose_cuts(
    layout: Layout, backend: Backend, call: Call, split: int | bool | None, why: list[str]
) -> Cuts | None:
    """Which rows and columns are cut: as asked; else rows, where it is known and predicted to pay."""
    if split is False:
        return None
    if (refusal := refuses(backend, call)) is not None:
        if split is None:
            return None
        raise BackendError(f"split={split} cannot be had here: {refusal}; leave split out")
    rows = layout.kv_num_blocks + layout.full_kv_num_blocks
    if split is not None:
        return _asked(split, rows, _columns(layout, backend, call), layout, why)
    if call.device.type != "cuda" or on_device_only(call.device):
        return None
    try:
        return weighed(rows, layout, backend, call, why)
    except torch.OutOfMemoryError:
        # None is left to measure what the device can do.
        return None


def _columns(layout: Layout, backend: Backend, call: Call) -> Tensor | None:
    """How many rows visit each column, where columns may be cut."""
    heads, lists = layout.address.kernel_heads, layout.kv_num_blocks.shape[1]
    # The keys of a column are those of all heads that read them, whose lists must be one.
    shared = lists == 1 or heads[0] == heads[1]
    # FlashAttention-4 reads one table for each pair.
    read = backend.name == "flash" and call.score is not None and call.score.score.gathers > 0
    if not call.grads or layout.columns is None or not shared or read:
        return None
    return layout.columns.degrees.sum(0)


def refuses(backend: Backend, call: Call) -> str | None:
    """Why a backend cannot run pieces, or None."""
    if backend.name not in WALKING:
        return f"backend {backend.name!r} walks no rows of tiles that could be cut"
    asking = replace(call, lse=True)
    return of_pieces(backend, asking).refuses(asking)


def _asked(
    longest: int, rows: Tensor, columns: Tensor | None, layout: Layout, why: list[str]
) -> Cuts:
    why.append(f"rows and columns of more than {longest} tiles are cut as asked")

    def slots(numbers: Tensor) -> int:
        if on_device_only(numbers.device):
            return numbers.shape[-1]
        return _room(lengths_of(numbers, (longest,)).slots[0])

    return Cuts(
        longest,
        _row_slots(slots(rows), layout),
        longest,
        0 if columns is None else slots(columns),
    )


def weighed(
    rows: Tensor,
    layout: Layout,
    backend: Backend,
    call: Call,
    why: list[str],
) -> Cuts | None:
    """Rows forward by flex, where others wait so long for the longest that its pieces, and their making
    and merging, take less; in training nothing is cut unasked."""
    if backend.name not in GAINING or call.grads:
        return None
    box = ceilings(call.device, call.dtype)
    dims = call.head_dim, call.v_head_dim
    step = step_ms(layout.block_size, backend.name, dims, box)
    address = layout.address
    lanes = address.kernel_batch(layout.grid.batch) * address.kernel_heads[0]
    sharing = lanes // rows.shape[:2].numel()
    found = lengths_of(rows)
    whole = found.tiles * sharing * step / box.processors
    # Of a rule alone a layout is made once.
    again = 1e3 * CUTTING.layout if layout.select is not None else 0.0

    def saved(i: int) -> float:
        # The pieces are a second launch, with a last program of its own.
        waits = CUTTING.waits * (found.longest - 2 * found.at[i]) * step
        slots = _row_slots(_room(found.slots[i]), layout)
        moved = slots * lanes * layout.block_size[0] * call.dtype.itemsize * sum(dims)
        return waits - moved_ms(moved, box) - again

    best = max(range(len(found.at)), key=saved)
    if (less := saved(best)) <= CUTTING.least * whole:
        return None
    part = found.cut[best] / max(1, found.tiles)
    why.append(
        f"rows of more than {found.at[best]} tiles (the longest has {found.longest}; together "
        f"{part:.0%} of all) are cut, their pieces merged by lse: {less:.2g} ms less predicted"
    )
    return Cuts(found.at[best], _row_slots(_room(found.slots[best]), layout))


def _room(slots: int) -> int:
    return max(2, math.ceil(slots * _ROOM))


def _row_slots(slots: int, layout: Layout) -> int:
    return max(slots, ceil_div(_LEAST_ROWS, layout.block_size[0]))
