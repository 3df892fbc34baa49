"""Which compiled function has run a kind of work: none of what led to it is to be found again."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flexsparse.backends import Work
from flexsparse.backends.compiled import Kernel
from flexsparse.program import MaskProgram, ScoreProgram


class Route(NamedTuple):
    """The kernel of such work, and the score that it computes."""

    kernel: Kernel
    score: ScoreProgram | None


# Of each program the kernels that have run it.
_routes: WeakKeyDictionary[MaskProgram, dict[tuple[object, ...], Route]] = WeakKeyDictionary()
_MOST_ROUTES = 32


def kernel_of(work: Work, by: str) -> Kernel | None:
    """The compiled function that has run such work before."""
    if not remembers(work) or (routes := _routes.get(work.layout.program)) is None:
        return None
    route = routes.get(_form(work, by))
    return None if route is None else route.kernel


def arguments(work: Work) -> tuple[Any, ...]:
    """What a compiled function takes on a device."""
    q, k, v, layout, _, score_tables, _, _, grads = work
    # Without gradients the lists by column are not read.
    lists = layout.lists if grads else layout.by_row
    return q, k, v, lists, [t.detach() for t in layout.tables], list(score_tables)


def remembers(work: Work) -> bool:
    """On CPU tensors are not given as they are, and inside torch.compile nothing is kept."""
    return work.q.is_cuda and not torch.compiler.is_compiling()


def _form(work: Work, by: str) -> tuple[object, ...]:
    """All that decides which kernel runs the work of a given program."""
    q, k, v, layout = work.q, work.k, work.v, work.layout
    scored: tuple[object, ...] = ()
    if work.score is not None:
        # Whose identity cannot be given away: the route holds it.
        tables = [(t.shape, t.dtype, t.requires_grad) for t in work.score_tables]
        scored = (id(work.score), *tables)
    return (
        by, work.scale, work.lse, work.grads, torch.is_grad_enabled(), q.dtype,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.requires_grad, k.requires_grad, v.requires_grad, layout.form, *scored,
    )  # fmt: skip


def remember(work: Work, by: str, kernel: Kernel) -> None:
    """Notes that ``kernel`` has run such work."""
    if not remembers(work):
        return
    kept = _routes.setdefault(work.layout.program, {})
    if len(kept) < _MOST_ROUTES:
        kept[_form(work, by)] = Route(kernel, work.score)
