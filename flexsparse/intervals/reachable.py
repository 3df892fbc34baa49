"""Which blocks of keys a rule lets rows of queries reach: found once, as long as rule and lengths stand."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.coverage import Span
from flexsparse.device import lasting
from flexsparse.grid import Grid
from flexsparse.intervals.codes import rule_codes
from flexsparse.kernels.rows import EMPTY
from flexsparse.occupancy import on_device_only
from flexsparse.parameters import held
from flexsparse.program import mask_program
from flexsparse.rules import MaskMod, as_rule
from flexsparse.settling import settled

# Layers and steps ask the same: a model has a few rules and lengths. Of long ones a map is a byte a block.
_KEPT = 32
_BYTES = 2**28
_lock = Lock()
_found: OrderedDict[tuple[object, ...], tuple[list[Any], Tensor]] = OrderedDict()


def reach(
    rule: MaskMod | None, grid: Grid, heads: tuple[int, int], span: Span, device: torch.device
) -> Tensor:
    """bool ``[B or 1, Hq or 1, R, C]``: blocks ``span`` in which some query may see some key."""
    # In a captured step a position on the device moves on: what is known is of where it was.
    moves = isinstance(grid.q_offset, Tensor) and on_device_only(device)
    if torch.compiler.is_compiling() or not settled(rule) or moves:
        return _judged(rule, grid, heads, span, device)
    keep: list[Any] = []
    key = (held((rule, grid.q_offset), keep), grid.batch, heads, span, device)
    with _lock:
        known = _found.get(key)
        if known is not None:
            _found.move_to_end(key)
            # A copy: what callers do to it is theirs.
            return known[1].clone()
    reached = _judged(rule, grid, heads, span, device)
    with _lock:
        _found[key] = keep, reached
        while len(_found) > _KEPT or sum(map_.nbytes for _, map_ in _found.values()) > _BYTES:
            _found.popitem(last=False)
    return reached.clone()


@lasting
def _judged(
    rule: MaskMod | None, grid: Grid, heads: tuple[int, int], span: Span, device: torch.device
) -> Tensor:
    program = mask_program(Identity(*heads), grid, as_rule(rule), None, None)
    return rule_codes(program, program.fixed_tables(grid, device), grid, span, device) != EMPTY
