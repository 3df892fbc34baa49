"""The operations of a rule on intervals: what each can give, for any values within its operands.

An operation that is not here gives a number of which nothing is known, so that its tiles are split
further and settled by their pairs: a missing line costs time, never a wrong tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsparse.intervals.interval import Interval, cast, computed, constant, unknown

Bounds = tuple[Tensor, Tensor]


class Operation(NamedTuple):
    """One line of a rule: torch's operator, its operands, and a stand-in for its result.

    ``may_fail`` takes the tiles in which torch might raise an error at some pair.
    """

    name: str
    like: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    may_fail: Callable[[Tensor], None]

    def operand(self, i: int, dtype: torch.dtype | None = None) -> Interval:
        """Operand ``i`` in the type of the result, or in another."""
        return self.interval(self.args[i], dtype)

    def interval(self, value: Any, dtype: torch.dtype | None = None) -> Interval:
        known = value if isinstance(value, Interval) else constant(value, self.device)
        return cast(known, dtype or self.like.dtype)

    @property
    def common(self) -> torch.dtype:
        """The type in which the first two operands are compared."""
        a, b = (x.like if isinstance(x, Interval) else x for x in self.args[:2])
        return torch.result_type(a, b)

    @property
    def inexact(self) -> bool:
        return self.like.dtype.is_floating_point

    def bounds(self, low: Tensor, high: Tensor) -> Interval:
        """A result that cannot be off: a choice among operands, a truth, a whole number."""
        operands = [*self.args, *self.kwargs.values()]
        point = all(x.point for x in operands if isinstance(x, Interval))
        return Interval(low, high, self.like, point)

    def result(self, low: Tensor, high: Tensor) -> Interval:
        """A result of arithmetic in the type of the result."""
        return computed(self.bounds(low, high))

    def nothing(self) -> Interval:
        return unknown(self.like, self.device)


Handler = Callable[[Operation], Interval]
_HANDLERS: dict[str, Handler] = {}


def operate(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    may_fail: Callable[[Tensor], None],
) -> Interval:
    """``func`` as torch would call it, on intervals."""
    stand_ins = [x.like if isinstance(x, Interval) else x for x in args]
    named = {k: x.like if isinstance(x, Interval) else x for k, x in kwargs.items()}
    like = func(*stand_ins, **(named | {"device": "meta"} if "device" in named else named))
    name = str(func.overloadpacket).removeprefix("aten.")
    operation = Operation(name, like, args, kwargs, device, may_fail)
    handler = _HANDLERS.get(name)
    if handler is None:
        return operation.nothing()
    # Types promote by rank too: a result has the rank that torch gives it.
    return replace(handler(operation), like=like)


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def keep(function: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, function))
        return function

    return keep


# Sums and products


@_handles("add", "sub", "rsub")
def _sum(op: Operation) -> Interval:
    a, b = op.operand(0), op.operand(1)
    if op.kwargs.get("alpha", 1) != 1 or len(op.args) > 2:
        return op.nothing()
    if op.name == "add":
        return op.result(*_numbers(a.low + b.low, a.high + b.high))
    if op.args[0] is op.args[1] and not op.inexact:
        return op.result(torch.zeros_like(a.low), torch.zeros_like(a.low))
    if op.name == "rsub":
        a, b = b, a
    return op.result(*_numbers(a.low - b.high, a.high - b.low))


@_handles("mul")
def _product(op: Operation) -> Interval:
    return op.result(*_corners(torch.mul, op.operand(0), op.operand(1)))


@_handles("neg")
def _negative(op: Operation) -> Interval:
    a = op.operand(0)
    return op.result(-a.high, -a.low)


@_handles("abs")
def _absolute(op: Operation) -> Interval:
    return op.result(*_magnitude(op.operand(0)))


@_handles("pow")
def _power(op: Operation) -> Interval:
    if not isinstance(op.args[0], Interval) or not isinstance(op.args[1], int) or op.args[1] != 2:
        return op.nothing()
    low, high = _magnitude(op.operand(0))
    return op.result(*_numbers(low * low, high * high))


@_handles("sqrt")
def _root(op: Operation) -> Interval:
    a = op.operand(0)
    return op.result(*_numbers(a.low.sqrt(), a.high.sqrt()))


def _magnitude(a: Interval) -> Bounds:
    crosses = (a.low < 0) & (a.high > 0)
    ends = a.low.abs(), a.high.abs()
    return torch.where(crosses, 0.0, torch.minimum(*ends)), torch.maximum(*ends)


def _numbers(low: Tensor, high: Tensor) -> Bounds:
    """Bounds of which an infinite one means that the result may be no number at all."""
    held = low.isfinite() & high.isfinite()
    return torch.where(held, low, torch.nan), torch.where(held, high, torch.nan)


def _corners(of: Callable[[Tensor, Tensor], Tensor], a: Interval, b: Interval) -> Bounds:
    """The bounds of an operation that rises or falls in each operand."""
    ends = [of(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    low = torch.minimum(torch.minimum(ends[0], ends[1]), torch.minimum(ends[2], ends[3]))
    high = torch.maximum(torch.maximum(ends[0], ends[1]), torch.maximum(ends[2], ends[3]))
    return _numbers(low, high)


# Division


@_handles("floor_divide", "div", "reciprocal")
def _quotient(op: Operation) -> Interval:
    if op.name == "reciprocal":
        a, b = op.interval(1), op.operand(0)
    else:
        a, b = op.operand(0), op.operand(1)
    mode = "floor" if op.name == "floor_divide" else op.kwargs.get("rounding_mode")
    zero = _may_be_zero(b)
    if not op.inexact:
        op.may_fail(zero)
        a, b = _counted(a), _counted(b)
    low, high = _corners(torch.div, a, b)
    low, high = (torch.where(zero, torch.nan, x) for x in (low, high))
    if op.inexact:
        quotient = op.result(low, high)
        low, high = quotient.low, quotient.high
    if mode is None:
        return op.bounds(low, high)
    rounded = torch.floor if mode == "floor" else torch.trunc
    return (
        op.bounds(rounded(low), rounded(high))
        if op.inexact
        else op.result(rounded(low), rounded(high))
    )


@_handles("remainder", "fmod")
def _remainder(op: Operation) -> Interval:
    a, d = op.operand(0), op.operand(1)
    if op.inexact:
        return op.nothing()
    zero = _may_be_zero(d)
    op.may_fail(zero)
    low, high = (_residue if op.name == "remainder" else _signed_residue)(_counted(a), d)
    return op.result(torch.where(zero, torch.nan, low), torch.where(zero, torch.nan, high))


def _residue(a: Interval, d: Interval) -> Bounds:
    """Bounds of the integer ``a % d``, with the sign of ``d``, which is not zero."""
    turns = torch.floor(a.low / d.low)
    one_period = (d.low == d.high) & (turns == torch.floor(a.high / d.low))
    low = torch.where(one_period, a.low - turns * d.low, (d.low + 1).clamp(max=0))
    high = torch.where(one_period, a.high - turns * d.low, (d.high - 1).clamp(min=0))
    # Numbers that lie below every divisor stay what they are.
    stays = (a.low >= 0) & (a.high < d.low)
    return torch.where(stays, a.low, low), torch.where(stays, a.high, high)


def _signed_residue(a: Interval, d: Interval) -> Bounds:
    """Bounds of what is left of the integer ``a`` by ``d``, with the sign of ``a``."""
    size = Interval(*_magnitude(d), d.like, d.point)
    up = _residue(a, size)
    down = _residue(Interval(-a.high, -a.low, a.like, a.point), size)
    most = size.high - 1
    low = torch.where(a.low >= 0, up[0], torch.where(a.high <= 0, -down[1], -most))
    return low, torch.where(a.low >= 0, up[1], torch.where(a.high <= 0, -down[0], most))


def _may_be_zero(d: Interval) -> Tensor:
    return ~((d.low > 0) | (d.high < 0))


def _counted(a: Interval) -> Interval:
    """An integer small enough that its quotients are exact."""
    held = (a.low.abs() <= 2.0**31) & (a.high.abs() <= 2.0**31)
    low, high = (torch.where(held, x, torch.nan) for x in (a.low, a.high))
    return Interval(low, high, a.like, a.point)


# Choices


@_handles("minimum", "clamp_max")
def _least(op: Operation) -> Interval:
    a, b = op.operand(0), op.operand(1)
    return op.bounds(torch.minimum(a.low, b.low), torch.minimum(a.high, b.high))


@_handles("maximum", "clamp_min")
def _most(op: Operation) -> Interval:
    a, b = op.operand(0), op.operand(1)
    return op.bounds(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))


@_handles("clamp")
def _clamp(op: Operation) -> Interval:
    a = op.operand(0)
    low, high = a.low, a.high
    limits = [*op.args[1:], None, None]
    if (least := op.kwargs.get("min", limits[0])) is not None:
        bound = op.interval(least)
        low, high = torch.maximum(low, bound.low), torch.maximum(high, bound.high)
    if (most := op.kwargs.get("max", limits[1])) is not None:
        bound = op.interval(most)
        low, high = torch.minimum(low, bound.low), torch.minimum(high, bound.high)
    return op.bounds(low, high)


@_handles("where")
def _where(op: Operation) -> Interval:
    if len(op.args) != 3:
        return op.nothing()
    given, a, b = op.operand(0, torch.bool), op.operand(1), op.operand(2)
    sure, never = given.low == 1, given.high == 0
    low = torch.where(sure, a.low, torch.where(never, b.low, torch.minimum(a.low, b.low)))
    high = torch.where(sure, a.high, torch.where(never, b.high, torch.maximum(a.high, b.high)))
    return op.bounds(low, high)


# Comparisons


def _truth(op: Operation, sure: Tensor, never: Tensor) -> Interval:
    return op.bounds(sure.double(), (~never).double())


def _compares(
    of: Callable[[Operation, Interval, Interval], Interval], whole: bool
) -> Callable[[Operation], Interval]:
    def compare(op: Operation) -> Interval:
        common = op.common
        if op.args[0] is op.args[1] and not common.is_floating_point:
            return constant(whole, op.device, op.like)
        return of(op, op.operand(0, common), op.operand(1, common))

    return compare


def _less(op: Operation, a: Interval, b: Interval) -> Interval:
    return _truth(op, a.high < b.low, a.low >= b.high)


def _at_most(op: Operation, a: Interval, b: Interval) -> Interval:
    return _truth(op, a.high <= b.low, a.low > b.high)


def _equal(op: Operation, a: Interval, b: Interval) -> Interval:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _truth(op, same, _apart(a, b))


def _unequal(op: Operation, a: Interval, b: Interval) -> Interval:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _truth(op, _apart(a, b), same)


def _apart(a: Interval, b: Interval) -> Tensor:
    return (a.high < b.low) | (b.high < a.low)


_HANDLERS |= {
    "lt": _compares(_less, False),
    "le": _compares(_at_most, True),
    "gt": _compares(lambda op, a, b: _less(op, b, a), False),
    "ge": _compares(lambda op, a, b: _at_most(op, b, a), True),
    "eq": _compares(_equal, True),
    "ne": _compares(_unequal, False),
}


# Logic and bits


@_handles("bitwise_and", "logical_and", "__and__")
def _and(op: Operation) -> Interval:
    if op.common != torch.bool and op.like.dtype != torch.bool:
        return _masked(op)
    a, b = op.operand(0, torch.bool), op.operand(1, torch.bool)
    return op.bounds(torch.minimum(a.low, b.low), torch.minimum(a.high, b.high))


@_handles("bitwise_or", "logical_or", "__or__")
def _or(op: Operation) -> Interval:
    if op.like.dtype != torch.bool:
        return op.nothing()
    a, b = op.operand(0, torch.bool), op.operand(1, torch.bool)
    return op.bounds(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))


@_handles("bitwise_xor", "logical_xor", "__xor__")
def _xor(op: Operation) -> Interval:
    if op.like.dtype != torch.bool:
        return op.nothing()
    a, b = op.operand(0, torch.bool), op.operand(1, torch.bool)
    known = (a.low == a.high) & (b.low == b.high)
    odd = (a.low != b.low).double()
    return op.bounds(torch.where(known, odd, 0.0), torch.where(known, odd, 1.0))


@_handles("bitwise_not", "logical_not")
def _not(op: Operation) -> Interval:
    if op.like.dtype != torch.bool:
        a = op.operand(0)
        return op.result(-a.high - 1, -a.low - 1)
    a = op.operand(0, torch.bool)
    return op.bounds(1 - a.high, 1 - a.low)


def _masked(op: Operation) -> Interval:
    """``a & m``: a mask of low bits is a remainder; any other keeps a number within itself."""
    a, m = _counted(op.operand(0)), _counted(op.operand(1))
    if isinstance(op.args[1], int) and op.args[1] >= 0 and (op.args[1] + 1) & op.args[1] == 0:
        period = constant(op.args[1] + 1, op.device)
        return op.result(*_residue(a, period))
    held = (a.low >= 0) & (m.low >= 0)
    low = torch.where(held, m.low * 0, torch.nan)  # in fp64, as two plain numbers are not
    return op.result(low, torch.where(held, torch.minimum(a.high, m.high), torch.nan))


@_handles("__lshift__", "bitwise_left_shift")
def _shift_left(op: Operation) -> Interval:
    a = _counted(op.operand(0))
    if not isinstance(op.args[1], int) or not 0 <= op.args[1] < 31:
        return op.nothing()
    return op.result(a.low * 2 ** op.args[1], a.high * 2 ** op.args[1])


@_handles("__rshift__", "bitwise_right_shift")
def _shift_right(op: Operation) -> Interval:
    a = _counted(op.operand(0))
    if not isinstance(op.args[1], int) or not 0 <= op.args[1] < 31:
        return op.nothing()
    return op.result((a.low / 2 ** op.args[1]).floor(), (a.high / 2 ** op.args[1]).floor())


# Types, rounding and constants


@_handles("_to_copy", "clone", "detach", "alias", "lift_fresh_copy")
def _copied(op: Operation) -> Interval:
    return op.operand(0)


@_handles("floor", "ceil", "trunc")
def _rounded(op: Operation) -> Interval:
    of = {"floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc}[op.name]
    a = op.operand(0)
    return op.bounds(of(a.low), of(a.high))


@_handles("full", "full_like", "new_full", "scalar_tensor")
def _filled(op: Operation) -> Interval:
    return op.interval(next(x for x in reversed(op.args) if isinstance(x, bool | int | float)))


@_handles("zeros", "zeros_like", "new_zeros")
def _zeros(op: Operation) -> Interval:
    return constant(0, op.device, op.like)


@_handles("ones", "ones_like", "new_ones")
def _ones(op: Operation) -> Interval:
    return constant(1, op.device, op.like)
