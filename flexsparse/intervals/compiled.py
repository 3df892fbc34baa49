"""Traced code compiled for any lengths, and called past torch's guards in a form that they let through.

What Dynamo asks before each call takes the host several times longer than the call. Its answers depend
on the form of the arguments and on global settings, such as autocast, that traced code of comparisons
and fp64 does not. So the guards judge the first call of each form; what they then let run, with which
of the arguments and lengths in which order, is called at once where the form comes again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental import _config

from flexsparse.device import alone

# Forms kept of each kernel: where stretches are counted by the device, each call may have its own.
MOST = 64

Compiled = Callable[..., Sequence[Tensor]]


class _Run(NamedTuple):
    """What Inductor compiled, what it was called with, and what it gave."""

    compiled: Compiled
    args: tuple[object, ...]
    found: Sequence[Tensor]


class _Last(threading.local):
    """What the guards of this thread's last call let run."""

    run: _Run | None = None


def as_kernel(code: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Code of tensors that makes one, compiled when it first runs, for any lengths."""
    settings: Any = _config
    last = _Last()
    known: dict[tuple[object, ...], Callable[..., Tensor]] = {}

    def backend(traced: torch.fx.GraphModule, examples: list[Any]) -> Compiled:
        compiled: Compiled = torch._inductor.compile(traced, examples)

        def noted(*args: object) -> Sequence[Tensor]:
            found = compiled(*args)
            last.run = _Run(compiled, args, found)
            return found

        return noted

    guarded = torch.compile(alone(code), backend=backend, fullgraph=True, dynamic=True)

    def kernel(*args: Tensor) -> Tensor:
        form = tuple([_form(x) for x in args])
        if (direct := known.get(form)) is not None:
            return direct(*args)
        last.run = None
        # Lengths that happen to be the same need not be so again.
        with torch.no_grad(), settings.patch(use_duck_shape=False):
            found: Tensor = guarded(*args)
        if last.run is not None and (way := _way(last.run, args, found)) is not None:
            if len(known) >= MOST:
                known.clear()
            known[form] = way
        last.run = None
        return found

    return kernel


def _form(x: Tensor) -> tuple[object, ...]:
    """All that guards and compiled code ask of a tensor, but for what it holds."""
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


def _way(run: _Run, args: tuple[Tensor, ...], found: Tensor) -> Callable[..., Tensor] | None:
    """The same run of other arguments of the same form; None where it cannot be told from ``run``."""
    places = {id(x): place for place, x in enumerate(args)}
    order = [(places.get(id(x)), x) for x in run.args]
    told = all(place is not None or type(x) is int for place, x in order)
    if not told or len(places) < len(args) or [*map(id, run.found)] != [id(found)]:
        return None
    # A length belongs to the form; no tensor is kept.
    order = [(place, x if place is None else None) for place, x in order]
    compiled = run.compiled

    def direct(*args: Tensor) -> Tensor:
        return compiled(*[x if place is None else args[place] for place, x in order])[0]

    return direct
