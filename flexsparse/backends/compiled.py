"""Compiled functions, one for each kind of call, kept so that none specialises for another kind.

Sizes that vary within a kind are told to torch before it guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsparse.device import compiled_alone, compiles
from flexsparse.device.unguarded import backend
from flexsparse.errors import CompileError

Kernel = Callable[..., Any]
Key = tuple[object, ...]
_kernels: dict[Key, Kernel] = {}
_first_sizes: dict[Key, tuple[int, ...]] = {}


def entered(
    kind: Key,
    call: Sequence[Any],
    make: Callable[[], Kernel],
    label: str,
    what: Callable[[], str],
    *,
    lengths: Key = (),
    together: frozenset[int] = frozenset(),
) -> tuple[Any, Kernel]:
    """What the compiled function of this kind gives for ``call``: tensors, and lists of tensors; and
    the function.

    ``make`` gives the function where the kind is new, ``what`` says what is compiled in an error.
    ``lengths`` is what the function knows of sizes that may otherwise vary; ``together`` are those, counted
    through all tensors, that vary where any does, though two calls may agree in some.
    """
    kernel, fresh = _kept(kind, call, make, label, lengths, together)
    try:
        return kernel(*call), kernel
    except Exception as error:
        if fresh is not None:
            # What could not be compiled is not kept.
            _kernels.pop(fresh, None)
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        raise CompileError(f"torch could not compile {what()}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _kept(
    kind: Key,
    call: Sequence[Any],
    make: Callable[[], Kernel],
    label: str,
    lengths: Key,
    together: frozenset[int] = frozenset(),
) -> tuple[Kernel, Key | None]:
    """The compiled function, and its key if it is new.

    On CUDA the second set of sizes of a kind gets a kernel for all of them. On CPU sizes are static:
    torch's CPU template writes wrong code for some that vary.
    """
    tensors = flat(call)
    kind = (
        kind,
        torch.is_grad_enabled(),
        tuple((t.dtype, t.ndim, t.requires_grad, t.is_contiguous(), t.device) for t in tensors),
    )
    sizes = tuple(n for t in tensors for n in t.shape)
    first = _first_sizes.setdefault(kind, sizes)
    varying: tuple[int, ...] = ()
    key: Key = (*kind, lengths, sizes)
    if tensors[0].device.type != "cpu" and sizes != first:
        varying = tuple(i for i, n in enumerate(sizes) if n != first[i] or i in together)
        key = (*kind, lengths, varying, _pattern([sizes[i] for i in varying]))
    if key in _kernels:
        return _kernels[key], None
    compiled = compiled_alone(make(), dynamic=False, backend=backend())
    _kernels[key] = Marked(compiled, varying) if varying else compiled
    compiles.note(label)
    return _kernels[key], key


def _pattern(sizes: list[int]) -> tuple[object, ...]:
    """Which sizes are equal, or 1: torch makes each such pattern a kernel of its own."""
    order: dict[int, int] = {}
    return tuple(n if n in (0, 1) else order.setdefault(n, len(order) + 2) for n in sizes)


class Marked:
    """A compiled function told which sizes vary, counted through all tensors; the others are constants.

    The mark goes on a view: the caller's own tensors carry none.
    """

    def __init__(self, compiled: Kernel, varying: tuple[int, ...]) -> None:
        self.compiled = compiled
        self._varying = varying

    def __call__(self, *call: Any) -> Any:
        return self.compiled(*self.marked(call))

    def marked(self, call: Sequence[Any]) -> tuple[Any, ...]:
        place = 0

        def mark(t: Tensor | None) -> Tensor | None:
            nonlocal place
            if t is None:
                return None
            t = t.view_as(t)
            for axis in range(t.ndim):
                if place + axis in self._varying:
                    torch._dynamo.maybe_mark_dynamic(t, axis)
            place += t.ndim
            return t

        return tuple([[mark(t) for t in x] if isinstance(x, list) else mark(x) for x in call])


def flat(call: Sequence[Any]) -> list[Tensor]:
    """The tensors of a call, those of lists among them."""
    parts = [t for x in call for t in (x if isinstance(x, list) else [x])]
    return [t for t in parts if t is not None]
