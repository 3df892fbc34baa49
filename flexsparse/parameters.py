"""What a rule or score holds: its numbers as tensors, its tensors where they are needed.

`changed` copies a rule with other numbers or tensors, those of closures and tuples like fields; `held`
lists what a rule depends on, so that a change is seen.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from ctypes import c_float
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from flexsparse.versions import state_of

STATIC = "static"
TRACE = "_traced"
TRACED_AT = "_traced_at"
_LIFTED = "_flexsparse_number"
# Larger numbers stay numbers: beside the 32-bit positions of a kernel a tensor of them would wrap.
LARGEST_NUMBER = 2**30


def lift(mod: Any) -> Any:
    """A copy of ``mod`` whose numbers are 0-d tensors (double precision, until a kernel asks)."""

    def tensor(value: Any) -> Any:
        # Subclasses, bool and IntEnum among them, may mean more than their number.
        if type(value) is float or (type(value) is int and abs(value) <= LARGEST_NUMBER):
            return number_tensor(value)
        return value

    return changed(mod, tensor)


def moved(mod: Any, device: torch.device) -> Any:
    """A copy of ``mod`` with every tensor on ``device``; the same tensors where they are there."""
    return changed(mod, lambda value: value.to(device) if isinstance(value, Tensor) else value)


def changed(mod: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of ``mod`` with ``change`` made to each number and tensor that it holds: as a field that is
    not static, in a closure, a default, a global or a tuple."""

    def inner(value: Any) -> Any:
        if isinstance(value, Tensor | int | float):
            return change(value)
        return _copied(value, inner) if is_record(value) else _rebuilt(value, inner)

    return inner(mod)


def is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def number_tensor(value: float) -> Tensor:
    """A plain number as a 0-d tensor, which is known to be one."""
    dtype = torch.int32 if isinstance(value, int) else torch.float64
    number = torch.tensor(value, dtype=dtype, device="cpu")
    setattr(number, _LIFTED, True)
    return number


def single(number: float) -> float:
    """What single precision holds of a float."""
    return c_float(number).value


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor stands for a plain number of the user's, and is nobody else's."""
    return getattr(tensor, _LIFTED, False)


def _copied(mod: Any, change: Callable[[Any], Any]) -> Any:
    # Not dataclasses.replace: __init__ and __post_init__ judged the user's values, once.
    static = {f.name for f in dataclasses.fields(mod) if f.metadata.get(STATIC)}
    copy = object.__new__(type(mod))
    for name, value in holdings(mod).items():
        object.__setattr__(copy, name, value if name in static else change(value))
    return copy


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A function, partial or tuple that holds changed values; anything else as it is."""
    if type(value) is tuple:
        return tuple(change(part) for part in value)
    if isinstance(value, functools.partial):
        return functools.partial(
            _rebuilt(value.func, change),
            *(change(a) for a in value.args),
            **{k: change(v) for k, v in value.keywords.items()},
        )
    if not isinstance(value, FunctionType):
        return value
    if id(value) in _rebuilding.now:
        return value
    _rebuilding.now.add(id(value))
    try:
        return _refilled(value, change)
    finally:
        _rebuilding.now.remove(id(value))


class _Rebuilding(threading.local):
    """Functions that name each other are rebuilt once, from the outside in; in each thread."""

    def __init__(self) -> None:
        self.now: set[int] = set()


_rebuilding = _Rebuilding()


def _refilled(value: FunctionType, change: Callable[[Any], Any]) -> FunctionType:
    filled = [_cell(c, change, value) for c in value.__closure__ or ()]
    copy = FunctionType(
        value.__code__,
        _globals(value, change),
        value.__name__,
        tuple(change(d) for d in value.__defaults__ or ()) or None,
        tuple(filled),
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    return copy


def _globals(function: FunctionType, change: Callable[[Any], Any]) -> dict[str, Any]:
    """What the function reads by name: in a notebook, its parameters are globals."""
    names = function.__code__.co_names
    read = {n: function.__globals__[n] for n in names if n in function.__globals__}
    parameters = {n: change(x) for n, x in read.items() if isinstance(x, Tensor | int | float)}
    return {**function.__globals__, **parameters} if parameters else function.__globals__


def _cell(cell: CellType, change: Callable[[Any], Any], owner: FunctionType) -> CellType:
    inside = content(cell)  # none yet, in a function that names itself
    return cell if inside is owner or inside is None else CellType(change(inside))


def has_numbers(mod: Any) -> bool:
    """Whether ``mod`` holds a plain number somewhere."""
    return any(isinstance(x, tuple) and x[0] in (int, float) for x in held(mod, []))


def holdings(mod: Any) -> dict[str, Any]:
    """The attributes of ``mod`` that are its own, slots too, without its trace."""
    found = dict(vars(mod)) if hasattr(mod, "__dict__") else {}
    if dataclasses.is_dataclass(mod):
        found |= {
            f.name: getattr(mod, f.name) for f in dataclasses.fields(mod) if hasattr(mod, f.name)
        }
    found.pop(TRACE, None)
    found.pop(TRACED_AT, None)
    return found


def held(mod: Any, keep: list[Any]) -> tuple[object, ...]:
    """What ``mod`` depends on, as a value that changes when any of it changes.

    Tensors count by identity and version counter, numbers and strings by value, all else by
    identity. Whoever keeps the value must ``keep`` these objects: an identity can be given away.
    """
    return tuple(_walk(mod, set(), keep))


def _walk(value: Any, seen: set[int], keep: list[Any]) -> Iterator[object]:
    if isinstance(value, Tensor):
        # A tensor made in inference mode keeps no count of its changes: it never looks unchanged.
        changes = object() if value.is_inference() else state_of(value)
        keep.append(value)
        yield (id(value), value.data_ptr(), changes, value.requires_grad)
        return
    if isinstance(value, float):
        # 0.0 and -0.0 are equal, and NaN is no equal of its own.
        yield (type(value), value.hex())
        return
    if isinstance(value, int | str | type(None)):
        yield (type(value), value)
        return
    if isinstance(value, list | tuple | dict):
        yield (type(value), len(value))
    else:
        # A container is what it holds: the caller's is made anew for each call.
        keep.append(value)
        yield id(value)
    if id(value) in seen:
        return
    seen.add(id(value))
    for code in _code(value):
        keep.append(code)
        yield id(code)
    for named in _whole(value):
        keep.append(named)
        yield id(named)
    for part in _parts(value):
        yield from _walk(part, seen, keep)


def _code(value: Any) -> Iterator[CodeType]:
    """What runs when ``value`` is called: a module that is loaded anew changes it in place."""
    function = value if isinstance(value, FunctionType) else call_of(type(value))
    if isinstance(function, FunctionType):
        yield function.__code__


def _whole(value: Any) -> Iterator[ModuleType | type]:
    """Modules and classes that a function reads by name: nobody walks these."""
    if isinstance(value, FunctionType):
        for name in value.__code__.co_names:
            if isinstance(read := value.__globals__.get(name), ModuleType | type):
                yield read


def call_of(kind: type) -> Any:
    """The function behind a call of its instances, as its class or one above it has it."""
    return next((vars(c)["__call__"] for c in kind.__mro__ if "__call__" in vars(c)), None)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield from map(content, value.__closure__ or ())
        yield from defaults_of(value)
        for name in value.__code__.co_names:
            read = value.__globals__.get(name)
            if not isinstance(read, ModuleType | type):
                yield read
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif (hasattr(value, "__dict__") or is_record(value)) and not isinstance(value, type):
        yield from holdings(value).values()


def defaults_of(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def name_of(mod: Any, tensor: Tensor) -> str:
    """What the user calls a tensor that ``mod`` holds: its field, or the variable closed over."""
    return next((name for name, held in _named(mod, set()) if held is tensor), "a captured table")


def _named(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts = {name: content(cell) for name, cell in names}
        read = value.__code__.co_names
        parts |= {name: value.__globals__[name] for name in read if name in value.__globals__}
    elif hasattr(value, "__dict__") and not isinstance(value, type | Tensor | ModuleType):
        parts = holdings(value)
        for name, part in list(parts.items()):
            if isinstance(part, tuple):
                parts |= {f"{name}[{i}]": inner for i, inner in enumerate(part)}
    else:
        return
    for name, part in parts.items():
        yield name, part
        yield from _named(part, seen)


def content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def describe(mod: Any) -> str:
    """One line for reports, errors and test ids; tensors as dtype and shape, never their contents.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Doc:
    ...     of: torch.Tensor
    >>> describe(Doc(torch.zeros(256, dtype=torch.int64)))
    'Doc(of=int64[256])'
    """
    if isinstance(mod, Tensor):
        return f"{str(mod.dtype).removeprefix('torch.')}{list(mod.shape)}"
    if type(mod) is tuple:
        return f"({', '.join(map(describe, mod))})"
    if isinstance(mod, functools.partial):
        return describe(mod.func)
    if (text := getattr(mod, "describe", None)) is not None and not isinstance(mod, type):
        return str(text())
    if is_record(mod):
        fields = (f"{f.name}={describe(getattr(mod, f.name))}" for f in dataclasses.fields(mod))
        return f"{type(mod).__name__}({', '.join(fields)})"
    if isinstance(mod, FunctionType):
        code = mod.__code__
        return f"{mod.__name__} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"
    plain = mod is None or isinstance(mod, int | float | str | bool)
    return repr(mod) if plain else type(mod).__name__
