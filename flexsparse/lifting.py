"""Numbers of a rule on their way into its kernel.

A plain number inside a rule is a constant of the kernel: each new value would be a new compile. So a rule
is traced with numbers that know where they came from. To Python they are what they are: it computes with
them exactly, branches on them, looks them up. Where one meets a tensor it becomes an argument, a 0-d
tensor; where none may stand, it stays a constant.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from flexsparse.nested import leaves, mapped
from flexsparse.parameters import LARGEST_NUMBER, changed, number_tensor, single
from flexsparse.recording import Refusal, is_users

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift, "rshift": operator.rshift,
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "invert": operator.invert
}  # fmt: skip
# These make a tensor of a number.
_LONE = (torch.where, Tensor.where)


class Int(int):
    """An integer of a rule, or one computed from its numbers."""

    argument: Tensor | None = None


class Float(float):
    """The same of a float."""

    argument: Tensor | None = None


def marked(value: Any) -> Any:
    """A plain number as one that knows where it came from; anything else as it is."""
    # Subclasses, bool and IntEnum among them, may mean more than their number.
    if type(value) is int:
        return Int(value)
    return Float(value) if type(value) is float else value


def plain(value: Any) -> Any:
    """The number alone."""
    if isinstance(value, Int):
        return int(value)
    return float(value) if isinstance(value, Float) else value


def _binary(compute: Callable[[Any, Any], Any], turned: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        a, b = plain(self), plain(other)
        return marked(compute(b, a) if turned else compute(a, b))

    return method


def _unary(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: marked(compute(plain(self)))


for _kind, _base in ((Int, int), (Float, float)):
    for _name, _compute in _BINARY.items():
        if hasattr(_base, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _binary(_compute, turned=False))
            setattr(_kind, f"__r{_name}__", _binary(_compute, turned=True))
    for _name, _alone in _UNARY.items():
        if hasattr(_base, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _unary(_alone))


def lifted(mod: Any) -> Any:
    """A copy of ``mod`` whose numbers know where they came from, those of closures and tuples too."""
    return changed(mod, marked)


class Lifting(TorchFunctionMode):
    """Makes such numbers arguments where they meet tensors.

    ``doubles`` keeps what single precision does not hold, for rules that compute in double.
    """

    def __init__(self, doubles: bool) -> None:
        super().__init__()
        self.doubles = doubles

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = (args, kwargs or {})
        if any(isinstance(x, float) for x in leaves(given)):
            given = mapped(given, _claimed)
        if not any(isinstance(x, Int | Float) for x in leaves(given)):
            return func(*args, **(kwargs or {}))
        try:
            alone = func in _LONE and not any(map(_is_float, leaves(given)))
            args, named = mapped(given, self._lone if alone else self._argument)
            if func is Tensor.__rsub__:
                func, args = torch.sub, args[::-1]
            return func(*args, **named)
        except (TypeError, RuntimeError, Refusal):
            # Such as a bound of clamp beside a constant, or what torch.full is filled with.
            args, named = mapped(given, plain)
            return func(*args, **named)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Int | Float) or self._stays(value):
            return plain(value)
        if value.argument is None:
            with _disable_current_modes():
                value.argument = number_tensor(plain(value))
        return value.argument

    def _lone(self, value: Any) -> Any:
        """A number that is no operand of a tensor's: of the type that torch gives it."""
        made = self._argument(value)
        if made is value or not isinstance(made, Tensor):
            return made
        return made.to(torch.float32 if made.is_floating_point() else torch.int64)

    def _stays(self, value: Int | Float) -> bool:
        if isinstance(value, Int):
            # Beside the 32-bit positions of a kernel a larger one would wrap as a tensor.
            return abs(value) > LARGEST_NUMBER
        return self.doubles and single(value) != value


def _claimed(value: Any) -> Any:
    """A float that Python made of a rule's numbers, and which may know of them no more, as one of them."""
    return marked(value) if type(value) is float and value not in _written() else value


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _written() -> set[float]:
    """The floats that stand in the code which is running, or in its module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    found: set[float] = set()
    while frame is not None and is_users(frame.f_code.co_filename):
        code = frame.f_code
        read = [frame.f_globals.get(name) for name in code.co_names]
        found |= {x for x in leaves([*code.co_consts, *read]) if type(x) is float}
        frame = frame.f_back
    return found
