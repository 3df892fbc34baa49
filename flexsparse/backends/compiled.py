"""Compiled functions, one for each kind of call, kept so that none ever specialises again.

torch counts specialisations per code object and gives up after eight, so each kind gets a code object
of its own, and sizes that vary within a kind are told to torch before it guesses.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsparse.device import compiles

Kernel = Callable[..., Any]
Key = tuple[object, ...]
_kernels: dict[Key, Kernel] = {}
_first_sizes: dict[Key, tuple[int, ...]] = {}


def kept(
    kind: Key, call: Sequence[Any], body: Kernel, label: str, *, lengths: Key = ()
) -> tuple[Kernel, Key | None]:
    """The compiled ``body`` for this kind of ``call``, and its key if it is new.

    ``call`` holds tensors and lists of tensors; ``lengths`` is what the body knows of sizes that may
    otherwise vary. On CUDA the second set of sizes of a kind gets a kernel
    for all of them. On CPU sizes are static: torch's CPU template writes wrong code for some that vary.
    """
    assert isinstance(body, types.FunctionType)
    tensors = _flat(call)
    kind = (
        body.__name__,
        kind,
        torch.is_grad_enabled(),
        tuple((t.dtype, t.ndim, t.requires_grad, t.is_contiguous(), t.device) for t in tensors),
    )
    sizes = tuple(n for t in tensors for n in t.shape)
    first = _first_sizes.setdefault(kind, sizes)
    varying: tuple[int, ...] = ()
    key: Key = (*kind, lengths, sizes)
    if tensors[0].device.type != "cpu" and sizes != first:
        varying = tuple(i for i, n in enumerate(sizes) if n != first[i])
        key = (*kind, lengths, varying, _pattern([sizes[i] for i in varying]))
    if key in _kernels:
        return _kernels[key], None
    own = types.FunctionType(
        body.__code__.replace(co_name=f"{body.__name__}_{len(_kernels)}"),
        body.__globals__,
        body.__name__,
        body.__defaults__,
        body.__closure__,
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False)
    _kernels[key] = _marked(compiled, varying) if varying else compiled
    compiles.note(label)
    return _kernels[key], key


def forget(key: Key) -> None:
    """Drops a kernel that could not be compiled."""
    _kernels.pop(key, None)


def _pattern(sizes: list[int]) -> tuple[object, ...]:
    """Which sizes are equal, or 1: torch makes each such pattern a kernel of its own."""
    order: dict[int, int] = {}
    return tuple(n if n in (0, 1) else order.setdefault(n, len(order) + 2) for n in sizes)


def _marked(kernel: Kernel, varying: tuple[int, ...]) -> Kernel:
    """``kernel`` told which sizes vary, counted through all tensors; the others are constants.

    The mark goes on a view: the caller's own tensors carry none.
    """

    def marking(*call: Any) -> Any:
        place = 0

        def mark(t: Tensor | None) -> Tensor | None:
            nonlocal place
            if t is None:
                return None
            t = t.view_as(t)
            for axis in range(t.ndim):
                if place + axis in varying:
                    torch._dynamo.maybe_mark_dynamic(t, axis)
            place += t.ndim
            return t

        return kernel(*([mark(t) for t in x] if isinstance(x, list) else mark(x) for x in call))

    return marking


def _flat(call: Sequence[Any]) -> list[Tensor]:
    parts = [t for x in call for t in (x if isinstance(x, list) else [x])]
    return [t for t in parts if t is not None]
