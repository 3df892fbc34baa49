"""Positions that move on: the offset of a growing sequence, advanced on the device alone.

Keys lie in buffers of a fixed capacity, ``kv_len``. A step adds to the offset in place and asks the
rule about every pair of its few queries anew, so that the tiles are exact and no shape ever changes:
the whole step can stand in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexsparse.ahead import Ahead, Terms
from flexsparse.bounds import check_tables
from flexsparse.building import lists_for, maps_of
from flexsparse.coverage import Span
from flexsparse.device import lasting
from flexsparse.errors import ArgumentError, LayoutError, RuleError, ShapeError
from flexsparse.grid import LARGEST, Grid
from flexsparse.kernels.compress import compress
from flexsparse.occupancy import list_axes, on_device_only
from flexsparse.program import ScoreProgram
from flexsparse.rules import MaskMod, MaskRule
from flexsparse.scores import ScoreRule
from flexsparse.tracing import Traced, naming

Step = int | Tensor


def check_step(terms: Terms, by: Step) -> None:
    """Refuses what cannot move on, and what is no step."""
    offset = terms.grid.q_offset
    if not terms.moves:
        raise LayoutError(
            f"plan.advance needs {_lacking(terms)}: make the plan so, or make the layout anew at each step"
        )
    assert isinstance(offset, Tensor)
    if offset.is_inference() and not torch.is_inference_mode_enabled():
        raise LayoutError(
            "q_offset was made in inference mode and is added to in place: advance in that mode, or make "
            "the plan with a clone of it"
        )
    if any(n > 1 and step == 0 for n, step in zip(offset.shape, offset.stride(), strict=True)):
        raise LayoutError(
            f"q_offset {list(offset.shape)} is expanded from one number and is added to in place: make the "
            "plan with a clone of it"
        )
    if isinstance(by, Tensor):
        if by.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"by must be an int or an int tensor [B], got {by.dtype}")
        if by.device != offset.device or tuple(by.shape) not in ((), tuple(offset.shape)):
            raise ShapeError(
                f"by must be an int or like q_offset {list(offset.shape)} on {offset.device}, got "
                f"{list(by.shape)} on {by.device}"
            )
    elif isinstance(by, bool) or not isinstance(by, int):
        raise ArgumentError(f"by must be an int or an int tensor [B], got {by!r}")
    elif abs(by) > LARGEST:
        raise ArgumentError(f"by must be within 2 ** 30, as positions are, got {by}")


def _lacking(terms: Terms) -> str:
    """What a plan that cannot move on would need."""
    offset = terms.grid.q_offset
    lacking = {
        f"q_offset as an int tensor on {terms.device}, got the int {offset}": not isinstance(
            offset, Tensor
        ),
        f"q_offset on {terms.device}, got one on {getattr(offset, 'device', None)}": isinstance(
            offset, Tensor
        )
        and offset.device != terms.device,
        "a plan without gradients: make it with tensors that need none": terms.columns != 0,
        "a plan without fallback": terms.program.reach is not None,
        "a plan without empty='error'": terms.empty == "error",
        "a plan without sanitize": terms.sanitize,
        "a plan without cluster": terms.program.ordered,
    }
    return ", and ".join(what for what, lacks in lacking.items() if lacks)


@lasting
def ready(
    terms: Terms,
    ahead: Ahead,
    rule: MaskRule | None,
    score: ScoreRule | None,
    scoring: ScoreProgram | None,
) -> Ahead:
    """What is ahead of a plan that is to move: looked at once by the host, outside any graph."""
    if ahead.past is not None:
        return ahead
    if on_device_only(terms.device):
        raise LayoutError(
            "the first plan.advance looks at the tables of the rule on the host, which a captured "
            "region cannot: advance once before, such as by=0"
        )

    def check(offset: int) -> None:
        keys = terms.grid.kv_len
        grid = Grid(keys, keys, q_offset=offset, batch=terms.grid.batch)
        for mod, traced in ((rule, terms.program.rule), (score, scoring and scoring.score)):
            if isinstance(traced, Traced):
                check_tables(mod, traced, grid, terms.program.address.heads)

    # Every position of the keys is one that some query will stand at.
    check(0)
    try:
        check(-LARGEST)
        lowest = -LARGEST
    except RuleError:
        # Before the first key there is nothing to be read, where nothing was so far.
        lowest = min(0, int(torch.as_tensor(terms.grid.q_offset).min()))
    past = torch.zeros((), dtype=torch.bool, device=terms.device)
    return replace(ahead, past=past, lowest=lowest)


def refuse_outside(ahead: Ahead, grid: Grid, by: Step) -> None:
    """Refuses steps off either end, where the host may look."""
    offset = grid.q_offset
    assert isinstance(offset, Tensor)
    if offset.device.type == "cpu" and bool(_leaves(offset.to(torch.int64) + by, ahead, grid)):
        raise LayoutError(_outside(ahead, grid))


def move(terms: Terms, ahead: Ahead, by: Step) -> None:
    """Adds ``by`` to the offset, and brings what is ahead up to date; all in place.

    Nobody moves past the last position, or before the least: who would stays there, and ``ahead.past``
    says so.
    """
    program, grid, span = terms.program, terms.grid, terms.logical_span
    offset = grid.q_offset
    assert isinstance(offset, Tensor) and ahead.past is not None
    moved = offset.to(torch.int64) + by
    ahead.past.logical_or_(_leaves(moved, ahead, grid))
    offset.copy_(moved.clamp(ahead.lowest, _last(grid)))
    for table in ahead.tables.offset:
        if table.data_ptr() != offset.data_ptr():
            table.copy_(offset.view(table.shape))
    if program.rule is None:
        return
    alone = program.of_rule_alone()
    axes = list_axes(alone, grid, None)
    with naming(program.rule):
        codes = codes_of(alone.mod(alone.tables(ahead.tables)), axes, span, terms.device)
    if ahead.codes is not None:
        ahead.codes.copy_(program.address.codes(codes))
    if ahead.lists is not None:
        maps = maps_of(lists_for(terms, None, axes).of(codes))
        counts, indices = compress(maps)
        for i, new in enumerate((counts[0], indices[0], counts[1], indices[1])):
            ahead.lists[i].copy_(new)


def codes_of(mask: MaskMod, axes: tuple[int, int], span: Span, device: torch.device) -> Tensor:
    """int8 ``[B, H, R, C]``: 0 where ``mask`` allows nothing, 2 where all, 1 between; by every pair."""
    b = torch.arange(axes[0], device=device).view(-1, 1, 1, 1)
    h = torch.arange(axes[1], device=device).view(1, -1, 1, 1)
    kv = torch.arange(span.kv_len, device=device).view(1, 1, 1, -1)
    columns = span.tiles[1]
    missing = columns * span.kv_tile - span.kv_len
    rows = []
    for start in range(0, span.q_len, span.q_tile):
        stop = min(start + span.q_tile, span.q_len)
        q = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        seen = mask(b, h, q, kv).expand(*axes, stop - start, span.kv_len)
        some = torch.nn.functional.pad(seen.any(2), (0, missing), value=False)
        every = torch.nn.functional.pad(seen.all(2), (0, missing), value=True)
        shape = (*axes, columns, span.kv_tile)
        rows.append(some.view(shape).any(-1).to(torch.int8) + every.view(shape).all(-1))
    return torch.stack(rows, 2)


def refuse_past(ahead: Ahead, grid: Grid) -> None:
    """Raises where some step would have left the keys; told once."""
    if ahead.past is not None and bool(ahead.past):
        ahead.past.zero_()
        raise LayoutError(_outside(ahead, grid))


def _last(grid: Grid) -> int:
    """The largest offset at which all queries stand among the keys."""
    return grid.kv_len - grid.q_len


def _leaves(moved: Tensor, ahead: Ahead, grid: Grid) -> Tensor:
    return ((moved > _last(grid)) | (moved < ahead.lowest)).any()


def _outside(ahead: Ahead, grid: Grid) -> str:
    least = (
        "2 ** 30 before the first key"
        if ahead.lowest == -LARGEST
        else f"before offset {ahead.lowest}"
    )
    return (
        f"plan.advance would move a query past the last of {grid.kv_len} keys, at offset {_last(grid)}, "
        f"or {least}: make k, v and the plan for more keys, and step back no further"
    )
