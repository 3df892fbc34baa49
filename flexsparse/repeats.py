"""A run like one before: what was judged and found for that one is neither judged nor found again.

Only of runs forward that are one call of a compiled function, whose arguments are all that differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexsparse.backends import Work
from flexsparse.backends.direct import Direct
from flexsparse.backends.routes import kernel_of
from flexsparse.device import autocast_dtype, tangents_there
from flexsparse.layout import Layout
from flexsparse.result import Result

if TYPE_CHECKING:
    from flexsparse.plan import Plan

Form = tuple[object, ...]


class Repeat(NamedTuple):
    """The kernel of runs of a form, and the ``shapes`` in which it sees q, k and v, where these are
    other views of them."""

    form: Form
    kernel: Direct
    shapes: tuple[torch.Size, ...] | None


class Repeats(NamedTuple):
    """What a plan ran; ``own``: its layout stays the first while no tensor changes; ``device`` as
    torch.autocast names it."""

    runs: list[Repeat]
    own: bool
    device: str


_repeats: WeakKeyDictionary[Plan, Repeats] = WeakKeyDictionary()
# So few that to look through them costs less than the hash of a form.
_MOST_FORMS = 8


def again(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, layout: Layout | None, return_lse: bool
) -> Result | None:
    """What the plan gives for tensors and a layout of a form that it ran before; else None."""
    if torch.compiler.is_compiling() or (known := _repeats.get(plan)) is None:
        return None
    if layout is None and known.own:
        layout = plan.first
    program = plan.terms.program
    if type(layout) is not Layout or layout.program is not program:
        return None
    if torch.is_autocast_enabled(known.device) or tangents_there():
        return None
    form = _form(q, k, v, layout, return_lse)
    for run in known.runs:
        if run.form == form:
            break
    else:
        return None
    if not layout.versions.unchanged:
        layout.refuse_outdated()
    address, shapes = program.address, run.shapes
    if shapes is None:
        q, k, v = address.pack(q, "q"), address.pack(k, "k"), address.pack(v, "v")
    else:
        q, k, v = q.view(*shapes[0]), k.view(*shapes[1]), v.view(*shapes[2])
    out, lse = run.kernel(q, k, v, *layout.read_forward)
    out = address.unpack(out, plan.terms.grid.batch)
    if lse is not None:
        lse = address.unpack(lse, plan.terms.grid.batch)
    return Result(out, lse, plan, layout)


def note(plan: Plan, q: Tensor, k: Tensor, v: Tensor, work: Work) -> None:
    """Remembers the kernel of ``work``, where it is all that the plan does for such q, k and v."""
    layout = work.layout
    whole = layout.order is None and layout.launches is None and layout.seen_keys is None
    if work.grads or work.score is not None or plan.sink is not None or not whole:
        return
    kernel = kernel_of(work, plan.backend)
    if kernel is None or layout.program is not plan.program or autocast_dtype(plan.device):
        return
    known = _repeats.get(plan)
    if known is None:
        own = plan.program.counts_changes(plan.grid)
        known = _repeats[plan] = Repeats([], own, plan.device.type)
    form = _form(q, k, v, layout, work.lse)
    if form is None or len(known.runs) == _MOST_FORMS:
        return
    packed = (work.q, work.k, work.v)
    viewed = all(
        x.data_ptr() == p.data_ptr() and x.shape != p.shape
        for x, p in zip((q, k, v), packed, strict=True)
    )
    shapes = tuple([p.shape for p in packed]) if viewed else None
    known.runs.append(Repeat(form, Direct(kernel), shapes))


def _form(q: Tensor, k: Tensor, v: Tensor, layout: Layout, return_lse: bool) -> Form | None:
    """All that a plan judges of a run, or by which its kernel is known; None where there is more.

    Written out: this is done for every run.
    """
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    if type(return_lse) is not bool or torch._C._functorch.peek_interpreter_stack():
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    try:
        return (
            layout.form, return_lse, torch.is_grad_enabled(),
            q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
            k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
            v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
        )  # fmt: skip
    except RuntimeError:
        # Sparse and nested tensors have no strides.
        return None
