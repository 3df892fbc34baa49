"""Whether a rule or score is as it was: found once with all that it reads, and then looked at again.

`settled` and `held` walk a mod through its fields, closures and defaults. What they found stays true
while each of these places holds the same object and no tensor among them has changed, and that is quick
to see.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from types import FunctionType
from typing import Any

from torch import Tensor

from flexsparse.parameters import TRACE, TRACED_AT, call_of, content, held, holdings
from flexsparse.settling import settled
from flexsparse.versions import State, state_of

_MISSING = object()
# So many mods are remembered, each with what it holds.
_KEPT = 16
_watches: dict[int, Watch] = {}
_lock = Lock()


class Watch:
    """What a settled ``mod`` depends on: ``held`` is its value, ``keep`` the objects that it names.

    It is ``whole`` where each place that could change is seen from here.
    """

    def __init__(self, mod: Any) -> None:
        self.mod = mod
        self.keep: list[Any] = []
        self.held = held(mod, self.keep)
        self._tensors: list[tuple[Tensor, State, bool]] = []
        self._records: list[tuple[Any, type, Any, dict[str, Any], list[tuple[str, Any]]]] = []
        self._functions: list[tuple[FunctionType, Any, Any, list[tuple[Any, Any]]]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self.whole = all(self._look(part) for part in self._reached(mod, set()))

    def unchanged(self) -> bool:
        """Whether every place holds what it did; walked again where not all of them are seen."""
        if not self.whole:
            return self.held == held(self.mod, [])
        for tensor, state, grad in self._tensors:
            if state_of(tensor) != state or tensor.requires_grad is not grad:
                return False
        for record, kind, call, own, fields in self._records:
            if type(record) is not kind or call_of(kind) is not call or vars(record) is not own:
                return False
            if len(own) - (TRACE in own) - (TRACED_AT in own) != len(fields):
                return False
            for name, value in fields:
                if own.get(name, _MISSING) is not value:
                    return False
        for function, code, defaults, cells in self._functions:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__
                or function.__dict__
            ):
                return False
            for cell, inside in cells:
                if content(cell) is not inside:
                    return False
        return all(place.get(name, _MISSING) is value for place, name, value in self._globals)

    def _look(self, part: Any) -> bool:
        """Notes where ``part`` could change; False where that cannot be seen from here."""
        if isinstance(part, Tensor):
            if part.is_inference():
                return False
            self._tensors.append((part, state_of(part), part.requires_grad))
        elif isinstance(part, FunctionType):
            if part.__kwdefaults__ or part.__dict__:
                return False
            cells = [(cell, content(cell)) for cell in part.__closure__ or ()]
            self._functions.append((part, part.__code__, part.__defaults__, cells))
            read = part.__globals__
            self._globals += [(read, n, read.get(n, _MISSING)) for n in part.__code__.co_names]
        elif not isinstance(part, int | float | str | tuple | None):
            own = getattr(part, "__dict__", None)
            fields = list(holdings(part).items())
            if own is None or any(name not in own for name, _ in fields):
                return False
            call = call_of(type(part))
            self._records.append((part, type(part), call, own, fields))
        return True

    def _reached(self, value: Any, seen: set[int]) -> Iterator[Any]:
        """All that a settled mod is made of."""
        if id(value) in seen:
            return
        seen.add(id(value))
        yield value
        parts: list[Any] = []
        if isinstance(value, tuple):
            parts = list(value)
        elif isinstance(value, FunctionType):
            helpers = (value.__globals__.get(name) for name in value.__code__.co_names)
            parts = [content(cell) for cell in value.__closure__ or ()]
            parts += [*(value.__defaults__ or ()), *helpers]
            parts = [p for p in parts if _watchable(p)]
        elif not isinstance(value, Tensor | int | float | str | None):
            parts = [*holdings(value).values(), call_of(type(value))]
        for part in parts:
            yield from self._reached(part, seen)


def _watchable(part: Any) -> bool:
    """Not a module, a class or a built-in, which stand for themselves."""
    return isinstance(part, Tensor | FunctionType | int | float | str | tuple) or (
        hasattr(type(part), "__dataclass_fields__") and not isinstance(part, type)
    )


def watch(mod: Any) -> Watch | None:
    """The watch of ``mod``, as it is now; None where not all that it reads can be seen."""
    known = _watches.get(id(mod))
    if known is not None and known.mod is mod and known.unchanged():
        return known
    if not settled(mod):
        return None
    found = Watch(mod)
    if not found.whole:
        return None
    with _lock:
        _watches[id(mod)] = found
        while len(_watches) > _KEPT:
            del _watches[next(iter(_watches))]
    return found
