"""Compiled code called past torch's guards, with arguments of a form that they let through.

What Dynamo asks before each call takes the host several times longer than the call itself. So the
guards judge the first call of each form; what they then let run, with which of the arguments and sizes
in which order, is called at once where the form comes again. Whoever keeps forms answers for all that
the guards ask: shapes, strides, types, devices and gradients of the arguments, modes and global settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
Compiled = Callable[..., Sequence[Tensor]]
# From the arguments of a call to what it gives.
Unguarded = Callable[[Sequence[Tensor]], list[Tensor]]


class _Run(NamedTuple):
    """What Inductor compiled, what it was called with, and what it gave."""

    compiled: Compiled
    args: tuple[object, ...]
    found: Sequence[Tensor]


class _Heard(threading.local):
    """What the guards let run in this thread, while somebody listens."""

    runs: list[_Run] | None = None


_heard = _Heard()
_registering = threading.Lock()


def backend() -> Any:
    """`noting`, or what was made the default of torch.compile instead of Inductor."""
    default = getattr(torch.compiler, "get_default_backend", lambda: "inductor")()
    if default != "inductor":
        return default
    known: Any = torch._dynamo
    with _registering:
        if "flexsparse" not in known.list_backends():
            # For a backend that it does not know torch keeps references to tensors: none could be swapped.
            known.register_backend(noting, name="flexsparse")
    return noting


def noting(traced: torch.fx.GraphModule, examples: list[Any]) -> Compiled:
    """A backend for torch.compile: Inductor, whose runs can be listened to."""
    compiled: Compiled = torch._inductor.compile(traced, examples)
    if torch._inductor.config.triton.cudagraphs:
        # Torch counts calls by their guards to know which outputs may go.
        return compiled

    def noted(*args: object) -> Sequence[Tensor]:
        found = compiled(*args)
        if _heard.runs is not None:
            _heard.runs.append(_Run(compiled, args, found))
        return found

    return noted


def guarded(
    call: Callable[[], R], args: Sequence[Tensor], parts: Callable[[R], Sequence[Tensor]]
) -> tuple[R, Unguarded | None]:
    """What ``call`` gives, which is one run of code compiled by `noting` with ``args``; and the same run
    past its guards, None where it cannot be told. ``parts`` are the tensors of what it gives."""
    before, runs = _heard.runs, list[_Run]()
    _heard.runs = runs
    try:
        found = call()
    finally:
        _heard.runs = before
    return found, _unguarded(runs[0], args, parts(found)) if len(runs) == 1 else None


def _unguarded(run: _Run, args: Sequence[Tensor], parts: Sequence[Tensor]) -> Unguarded | None:
    """The same run of other arguments of the same form. No tensor is kept."""
    places = {id(x): place for place, x in enumerate(args)}
    order = [(places.get(id(x)), x) for x in run.args]
    told = all(place is not None or type(x) is int for place, x in order)
    if not told or len(places) < len(args):
        return None
    given = {id(x): place for place, x in enumerate(run.found)}
    if not all(id(part) in given for part in parts):
        return None
    # A length belongs to the form; where a view begins is given too, but not read.
    taken = [(place, x if place is None else None) for place, x in order]
    wanted, compiled = [given[id(part)] for part in parts], run.compiled

    def again(args: Sequence[Tensor]) -> list[Tensor]:
        found = compiled(*[x if place is None else args[place] for place, x in taken])
        return [found[place] for place in wanted]

    return again
