"""What rule and membership say inside the partial tiles of a layout, evaluated ahead of a kernel.

A kernel written by hand has no place for a rule's code. Where few queries meet few tiles, what is
seen there is a small tensor, and one compiled kernel fills it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexsparse.backends import Work
from flexsparse.backends.compiled import Kernel, entered
from flexsparse.backends.split_walk import Lanes


def asked(work: Work, lanes: Lanes, indices: Tensor) -> Tensor | None:
    """bool ``[B or 1, lanes or 1, W, group or 1, Q, kv_tile]`` for ``indices [B or 1, lanes or 1, 1, W]``.

    An axis is 1 where nothing depends on it; None where listed tiles are seen whole.
    """
    layout = work.layout
    program = layout.program
    if program.rule is None and not program.asks_member(layout.block_size):
        return None
    tables = [t.detach() for t in layout.tables]
    # Only their sizes are read.
    queries, keys = work.q.detach()[:, 0, :, 0], work.k.detach()[0, 0, :, 0]
    call = (queries, keys, indices[:, :, 0], tables)
    seen: Tensor
    if torch.compiler.is_compiling() or not work.q.is_cuda:
        seen = _body(work, lanes, indices)(*call)
        return seen
    kind = ("asked", program.key, layout.block_size, lanes[1:], indices.shape[0] > 1)
    seen, _ = entered(
        kind,
        call,
        lambda: _body(work, lanes, indices),
        program.key,
        lambda: f"{program.rule.name if program.rule else 'a selection'} on {work.q.device}",
    )
    return seen


def _body(work: Work, lanes: Lanes, indices: Tensor) -> Kernel:
    """The function to compile. It closes over decisions only; every tensor is an argument."""
    layout, program = work.layout, work.layout.program
    block_size, kv_tile = layout.block_size, layout.block_size[1]
    by_batch = indices.shape[0] > 1 or program.uses_batch or program.address.fold > 1
    by_lane = indices.shape[1] > 1 or program.uses_head
    group, by_head = lanes.group, program.uses_head

    def asked_of(queries: Tensor, keys: Tensor, indices: Tensor, tables: list[Tensor]) -> Tensor:
        def axis(n: Any, place: int) -> Tensor:
            along = torch.arange(n, device=indices.device)
            return along.view([-1 if i == place else 1 for i in range(6)])

        batch, several = queries.shape[0] if by_batch else 1, lanes.heads if by_lane else 1
        heads = group if by_head else 1
        b, q = axis(batch, 0), axis(queries.shape[1], 4)
        h = axis(several, 1) * group + axis(heads, 3)
        tile = indices[..., None, None, None].to(torch.int64)
        # Past the end the rule is asked about the last key, and nobody reads what it says.
        kv = (tile * kv_tile + axis(kv_tile, 5)).clamp(max=keys.shape[0] - 1)
        seen = program.within(tables, block_size)(b, h, q, kv)
        shape = (batch, several, indices.shape[2], heads, queries.shape[1], kv_tile)
        return seen.broadcast_to(shape).contiguous()

    return asked_of
