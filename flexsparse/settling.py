"""Whether all that a rule or score reads is among what it holds, so that it is known without a trace."""

from __future__ import annotations

import dataclasses
import dis
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from flexsparse.parameters import call_of, content, defaults_of, holdings, is_record

# Built-ins through which a function can read anything.
_ASKS = {"getattr", "globals", "vars", "eval", "exec", "__import__"}


def _is_constant(read: Any) -> bool:
    """A module whose contents nobody changes, the class Tensor, or a helper of the gallery."""
    if isinstance(read, FunctionType):
        return read.__module__ in ("flexsparse.canvas", "flexsparse.rules") and settled(read)
    return read is Tensor or (isinstance(read, ModuleType) and read.__name__ in ("torch", "math"))


@functools.lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> frozenset[str]:
    """The names that code reads as globals; attributes stand among its names, too."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in _READS_GLOBAL)


_READS_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}


@functools.lru_cache(maxsize=1024)
def _asks_further(code: CodeType) -> bool:
    """Whether code reads what is not among its names: by a built-in, or out of a module it imports."""
    brought = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    outside = {name.partition(".")[0] for name in brought} - {"torch", "math"}
    return bool(outside or _ASKS & set(code.co_names))


def settled(mod: Any) -> bool:
    """Whether what ``mod`` holds says all about it, so that nothing else it reads can change.

    True of numbers, tensors, and functions and rules that read no more than these and modules. What
    reads a notebook's globals, attributes of objects or containers has to be traced to be known.
    """
    try:
        # Who reads an attribute need not be who holds the object: it may be handed on.
        return _settled(mod, (), frozenset(_names_in(mod, set())))
    except RecursionError:
        return False


def _names_in(mod: Any, seen: set[int]) -> Iterator[str]:
    """The names that any function in ``mod`` reads, attributes among them."""
    if id(mod) in seen or isinstance(mod, Tensor | int | float | str | type(None)):
        return
    seen.add(id(mod))
    parts: Iterable[Any] = ()
    if type(mod) is tuple:
        parts = mod
    elif isinstance(mod, FunctionType):
        yield from mod.__code__.co_names
        parts = (*map(content, mod.__closure__ or ()), *defaults_of(mod))
    elif is_record(mod):
        parts = (call_of(type(mod)), *holdings(mod).values())
    for part in parts:
        yield from _names_in(part, seen)


def _settled(mod: Any, within: tuple[FunctionType, ...], names: frozenset[str]) -> bool:
    """``names`` are those that any function reads where ``mod`` is held."""
    if isinstance(mod, Tensor):
        # Of a class of the user's anything may be asked, of torch's the attributes somebody set.
        return type(mod).__module__.partition(".")[0] == "torch" and not names & vars(mod).keys()
    if mod is None or type(mod) in (bool, int, float, str):
        return True
    if type(mod) is tuple:
        return all(_settled(x, within, names) for x in mod)
    if isinstance(mod, FunctionType):
        code = mod.__code__
        read = [mod.__globals__[n] for n in _globals_of(code) if n in mod.__globals__]
        inner = any(hasattr(constant, "co_code") for constant in code.co_consts)
        held_by = [*map(content, mod.__closure__ or ()), *defaults_of(mod)]
        plain = not inner and not vars(mod) and not _asks_further(code)
        # Functions may name each other.
        within = (*within, mod)
        return (
            plain
            and all(map(_is_constant, read))
            and all(any(x is w for w in within) or _settled(x, within, names) for x in held_by)
        )
    if not is_record(mod) or _speaks(type(mod)):
        return False
    # An attribute that is no field may be a property, or a constant of the class.
    foreign = names - {f.name for f in dataclasses.fields(mod)}
    if any(not foreign.isdisjoint(vars(c)) for c in type(mod).__mro__[:-1]):
        return False
    return all(_settled(x, within, names) for x in (call_of(type(mod)), *holdings(mod).values()))


# What no code of a mod calls by a sign or a built-in, or what dataclasses write.
_SILENT = frozenset(
    [
        "__init__",
        "__post_init__",
        "__new__",
        "__call__",
        "__repr__",
        "__eq__",
        "__hash__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__setattr__",
        "__delattr__",
        "__getstate__",
        "__setstate__",
        "__replace__",
        "__annotate__",
        "__annotate_func__",
    ]
)


def _speaks(kind: type) -> bool:
    """Whether a class of the user's has code of its own for signs, indices or attributes."""
    own = (c for c in kind.__mro__[:-1] if c.__module__.partition(".")[0] != __package__)
    return any(
        name.startswith("__") and name not in _SILENT and isinstance(value, FunctionType)
        for c in own
        for name, value in vars(c).items()
    )
