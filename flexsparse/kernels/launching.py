"""The door to Triton's kernels: what Triton works out anew at each launch is kept from the first.

``kernel[grid](...)`` binds arguments, specialises each and looks its kernel up by a text of all that,
which takes the host longer than the launch. The compiled kernel takes the same arguments and launches
at once, with Triton's launch hooks, in a graph's capture too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexsparse.errors import ShapeError

# Kinds kept: more than a process has use for at once.
MOST = 1024
# From here on an int is a long one.
_LONG = 2**31
# Programs along the second axis of a grid and the third.
_MOST_ACROSS = 2**16 - 1


def _no_device() -> int:
    return -1


# Triton's interpreter needs none.
_current_device = torch.cuda.current_device if torch.cuda.is_available() else _no_device

# Of each kind its kernel, which keeps its id from others, the compiled one, and its constants.
_kept: dict[tuple[object, ...], tuple[Any, Any, tuple[object, ...]]] = {}


def dispatch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **named: object) -> None:
    """``kernel[grid](*args, **named)`` of a `triton.jit` function, on the device of its first tensor and
    that device's current stream.

    ``args`` are its run-time arguments, in order, a tensor first; ``named`` its constants and launch
    options. The second and third axis of ``grid`` are counts of batch, heads or slots. Of a
    kind are launches that Triton runs by one compiled kernel: the device, constants and options are
    the same, every tensor has the same dtype and stands as even (at a multiple of 16 bytes or not),
    and every int is as long and as even, or 1. What a kernel does not specialise on may tell kinds
    apart here, never the other way round.
    """
    here, there = _current_device(), args[0].get_device()
    if there != here and there >= 0:
        with torch.cuda.device(there):
            return dispatch(kernel, grid, *args, **named)
    if len(grid) > 1 and max(grid[1:]) > _MOST_ACROSS:
        raise ShapeError(
            f"batch times heads, or their blocks, come to {max(grid[1:])} programs along one axis of a "
            f"launch, which takes {_MOST_ACROSS}: split the batch"
        )
    kind = (
        id(kernel),
        here,
        *[
            a.dtype
            if (of := type(a)) is Tensor and not a.data_ptr() & 15
            else ((2 if a & 15 else 16) if 1 < a < _LONG else a)
            if of is int
            else _kind_of(a)
            for a in args
        ],
        *named,
        *named.values(),
    )
    kept = _kept.get(kind)
    if kept is None or kernel.pre_run_hooks:
        _dispatch_first(kind, kernel, grid, args, named)
        return
    _, compiled, constants = kept
    compiled[(*grid, 1, 1)[:3]](*args, *constants)


def _kind_of(value: object) -> object:
    """Of an argument that is no int and no evenly placed tensor."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() & 15
    return float if type(value) is float else (type(value), value)


def _dispatch_first(
    kind: tuple[object, ...],
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[object, ...],
    named: dict[str, object],
) -> None:
    """By Triton's own way, which says what it compiled; its interpreter compiles nothing."""
    compiled = kernel[grid](*args, **named)
    constants = _constants(kernel, len(args), named)
    if constants is None or not hasattr(compiled, "__getitem__") or torch.version.hip:
        return
    if len(_kept) >= MOST:
        _kept.clear()
    _kept[kind] = kernel, compiled, constants


def _constants(kernel: Any, count: int, named: dict[str, object]) -> tuple[object, ...] | None:
    """What a compiled kernel takes behind ``count`` arguments; None where they are not told apart so."""
    params = getattr(kernel, "params", ())
    constant = [p.is_constexpr for p in params]
    plain = constant == [False] * count + [True] * (len(params) - count)
    names = [p.name for p in params[count:]]
    if not params or not plain or not named.keys() >= set(names):
        return None
    return tuple(named[name] for name in names)
