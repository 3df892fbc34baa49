"""Whether a rule reads its tables inside their lengths, found out before a kernel reads them.

A kernel reads what lies past a table's end without complaint. So the code of a rule runs once on the
positions of the call, with tables that judge their indices. An index that depends on one axis is
judged at every position; one that depends on query and key together at every pair of a small grid,
and at the borders and an even sample of a large one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexsparse.errors import RuleError
from flexsparse.grid import Grid
from flexsparse.parameters import describe, name_of
from flexsparse.tracing import Traced, naming
from flexsparse.versions import Versions

# Query and key positions tried together where an index depends on both.
_PAIRS = 1024


class _Table:
    """A captured tensor that judges the indices it is read at."""

    def __init__(self, tensor: Tensor, reader: str, name: str) -> None:
        self.tensor = tensor
        self.reader = reader
        self.name = name

    def __getitem__(self, indices: Any) -> Tensor:
        indices = indices if isinstance(indices, tuple) else (indices,)
        for axis, (index, length) in enumerate(zip(indices, self.tensor.shape, strict=True)):
            low, high = (int(x) for x in torch.aminmax(index))
            # An index between query and key may be negative where the pair is hidden: it counts
            # from the end, as everywhere in torch. A position before the table is a mistake.
            lowest = -length if index.ndim == 4 and min(index.shape[2:]) > 1 else 0
            if low < lowest or high >= length:
                of_heads = index.ndim == 4 and index.shape[1] == index.numel() > 1
                entries = f"each of {index.numel()} query heads" if of_heads else "every position"
                raise RuleError(
                    f"{self.reader} reads {self.name} at index {high if high >= length else low} of "
                    f"axis {axis}, which has {length}: give the table an entry for {entries}, "
                    "or clamp the index"
                )
        return self.tensor[tuple(i.to(torch.int64) for i in indices)]


# The call in which each rule was last found to stay inside its tables: layers and steps ask the same.
_held: WeakKeyDictionary[Traced, tuple[object, ...]] = WeakKeyDictionary()


def check_tables(mod: object, traced: Traced, grid: Grid, heads: int) -> None:
    """Raises `RuleError` where ``traced`` would read a table past its end in this call."""
    if torch.compiler.is_compiling() or not any(t.ndim for t in traced.tensors):
        return
    versions = Versions.of(traced.tensors)
    call = (grid.q_len, grid.kv_len, grid.q_offset, grid.batch, heads, versions)
    # A table that does not count its changes, and an offset on a device, may be others by now.
    counted = len(versions.tensors) == len(traced.tensors)
    lasts = isinstance(grid.q_offset, int) and counted
    if lasts and _held.get(traced) == call:
        return
    _check(mod, traced, grid, heads)
    if lasts:
        _held[traced] = call


@torch.no_grad()
def _check(mod: object, traced: Traced, grid: Grid, heads: int) -> None:
    device = next(t.device for t in traced.tensors if t.ndim)
    tables = [
        _Table(t.detach().to(device), traced.name, f"{name_of(mod, t)} {describe(t)}")
        if t.ndim
        else t.detach()
        for t in traced.tensors
    ]
    b = torch.arange(grid.batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    q = grid.positions(device).view(-1, 1, grid.q_len, 1)
    kv = torch.arange(grid.kv_len, device=device).view(1, 1, 1, -1)
    some_q = q[:, :, _spread(grid.q_len, device)]
    some_kv = kv[..., _spread(grid.kv_len, device)]
    ends_q, ends_kv = q[:, :, [0, -1]], kv[..., [0, -1]]
    tried = [(q, ends_kv), (ends_q, kv)]
    if traced.gathers:
        tried.append((some_q, some_kv))
    for at_q, at_kv in tried:
        # Heads and batches can matter to an index too, but not together with every pair at once.
        heads_here = h if at_q.shape[2] * at_kv.shape[3] <= _PAIRS * 64 else h[:, [0, -1]]
        score = (
            [torch.zeros((), device=device)] if "score" in traced.code.partition("\n")[0] else []
        )
        with naming(traced):
            traced.call(*score, b, heads_here, at_q, at_kv, *tables)


def _spread(length: int, device: torch.device) -> Tensor:
    return torch.linspace(0, length - 1, min(length, _PAIRS), device=device).round().to(torch.int64)
