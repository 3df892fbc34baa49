"""Whether two traces of a mod compute the same, step by step: the one with its numbers as constants, the
other as arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsparse.nested import leaves, mapped
from flexsparse.parameters import is_number, single
from flexsparse.recording import Recorder, Step


@dataclass(frozen=True, eq=False)
class Value:
    """A number that no position has a part in, however it came about."""

    number: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        a, b = self.number, other.number
        # Kernels hold floats in single precision, integers as they are.
        a, b = (single(x) if isinstance(x, float) else x for x in (a, b))
        return bool(a == b or (a != a and b != b))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class At:
    """An index or score of the mod, a table, or what a step gave."""

    kind: str
    which: object


class Meaning(NamedTuple):
    """The steps that a result takes, whose arguments are `Value` and `At`; and the tables they read."""

    steps: list[tuple[object, ...]]
    result: object
    tables: list[Tensor]


def meaning(recorder: Recorder, variable: str) -> Meaning:
    """What was recorded, apart from how its numbers were given."""
    known: dict[str, object] = {}
    numbers: dict[str, Tensor] = {}
    tables: list[Tensor] = []
    steps: list[tuple[object, ...]] = []

    def seen(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = recorder.name_of(value)
            if name not in known:
                known[name] = _given(value, name, tables)
            return known[name]
        return Value(value) if isinstance(value, int | float) else value

    def actual(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return numbers.get(recorder.name_of(value), value)

    for step in recorder.needed(variable):
        args, kwargs = mapped((step.args, step.kwargs), seen)
        if not any(isinstance(x, At) for x in leaves((args, kwargs))):
            given, named = mapped((step.args, step.kwargs), actual)
            numbers[step.variable] = made = step.func(*given, **named)
            known[step.variable] = Value(made.item())
            continue
        known[step.variable] = At("step", len(steps))
        steps.append(_written(step, args, kwargs))
    result = known.get(variable, At("at", variable))
    return Meaning(steps, result, tables)


def alike(a: Meaning, b: Meaning) -> bool:
    """Whether both compute the same at every position."""
    same = a.steps == b.steps and a.result == b.result and len(a.tables) == len(b.tables)
    return same and all(map(_same_table, a.tables, b.tables))


def _given(tensor: Tensor, name: str, tables: list[Tensor]) -> object:
    if not name.startswith("t"):
        return At("at", name)
    if is_number(tensor):
        return Value(tensor.item())
    tables.append(tensor)
    return At("table", len(tables) - 1)


def _written(step: Step, args: Any, kwargs: dict[str, Any]) -> tuple[object, ...]:
    packet = str(step.func.overloadpacket)
    if packet == "aten.rsub":
        # A number less a tensor is one operation, a tensor less a tensor another.
        packet, args = "aten.sub", (args[1], args[0], *args[2:])
    return packet, step.dtype, list(leaves(args)), kwargs


def _same_table(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
