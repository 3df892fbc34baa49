"""A layout whose long rows and columns are cut, run as launches of a backend, and merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexsparse.address import Axis, taken
from flexsparse.backends import Backend, Call, Work, flash, flex
from flexsparse.cutting import Slots
from flexsparse.kernels.columns import ColumnTiles
from flexsparse.kernels.pieces import beside, join, take
from flexsparse.kernels.reorder import reorder
from flexsparse.program import MaskProgram, ScoreProgram

Program = TypeVar("Program", MaskProgram, ScoreProgram)

# Of each program what launches make of it: the same objects every time, by which kernels are known.
_launched: WeakKeyDictionary[object, dict[Axis, object]] = WeakKeyDictionary()


def of_pieces(backend: Backend, call: Call | Work) -> Backend:
    """Who runs the pieces of rows, whose lse is needed: and in training its gradient."""
    if backend is flash and (call.grads or (call.score is not None and call.score.score.gathers)):
        return flex
    return backend


def run_launches(backend: Backend, work: Work) -> tuple[Tensor, Tensor | None]:
    """The call by ``backend``: at once, or whole rows and pieces each by a launch; rows in their order."""
    order = work.layout.order
    if order is None:
        return _run(backend, work)
    q, score, tables = reorder(work.q, *order), work.score, work.score_tables
    if score is not None:
        score = over(score, "order")
        tables = [order.place, *tables]
    out, lse = _run(backend, work._replace(q=q, score=score, score_tables=tables))
    back = order.inverse, order.place
    return reorder(out, *back), lse if lse is None else reorder(lse[..., None], *back)[..., 0]


def _run(backend: Backend, work: Work) -> tuple[Tensor, Tensor | None]:
    launches = work.layout.launches
    if launches is None:
        return backend.run(work)
    keys, rows = launches.columns, launches.rows
    if work.grads and keys is not None:
        k, v = (take(x, keys.place, keys.owner, keys.parts, True) for x in (work.k, work.v))
        whole = _over(work._replace(k=k, v=v), launches.trained, "keys", keys)
    else:
        whole = work._replace(layout=replace(work.layout, **_named(launches.whole)))
    if rows is None:
        return backend.run(whole)
    own, q = beside(work.q, rows.place, rows.owner, rows.parts)
    out, lse = backend.run(whole._replace(q=own))
    pieces = _over(work._replace(q=q, lse=True), launches.pieces, "rows", rows)
    found, found_lse = of_pieces(backend, work).run(pieces)
    assert found_lse is not None
    if lse is None:
        lse = torch.empty(out.shape[:3], dtype=found_lse.dtype, device=out.device)
    out, lse = join(out, lse, found, found_lse, rows.place, rows.owner, rows.parts)
    return out, lse if work.lse else None


def over(program: Program, axis: Axis) -> Program:
    """The program over rows or keys as a launch takes them."""
    if torch.compiler.is_compiling():
        return replace(program, address=taken(program.address, axis))
    known = _launched.setdefault(program, {})
    if axis not in known:
        known[axis] = replace(program, address=taken(program.address, axis))
    found = known[axis]
    assert isinstance(found, type(program))
    return found


def _over(work: Work, lists: list[Tensor], axis: Axis, slots: Slots) -> Work:
    """The work over rows or keys as a launch takes them, and its lists: whoever asks for a place reads its
    table."""
    score, tables = work.score, work.score_tables
    layout = replace(
        work.layout,
        program=over(work.layout.program, axis),
        tables=[slots.laid, *work.layout.tables],
        **_named(lists),
    )
    if score is not None:
        score = over(score, axis)
        tables = [slots.laid, *tables]
    return work._replace(layout=layout, score=score, score_tables=tables)


def _named(lists: list[Tensor]) -> dict[str, Any]:
    """Lists of a launch as a layout has them."""
    columns = ColumnTiles(*lists[4:8]) if len(lists) > 4 else None
    return {
        "kv_num_blocks": lists[0],
        "kv_indices": lists[1],
        "full_kv_num_blocks": lists[2],
        "full_kv_indices": lists[3],
        "columns": columns,
    }
