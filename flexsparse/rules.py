"""What may be seen: a mask_mod with parameters, and its algebra."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, FlexSparseError, RuleError
from flexsparse.lifting import Lifting, lifted
from flexsparse.likeness import alike
from flexsparse.parameters import (
    TRACE,
    TRACED_AT,
    describe,
    has_numbers,
    holdings,
    lift,
    moved,
)
from flexsparse.settling import settled
from flexsparse.shown import Shown
from flexsparse.tracing import MASK_ARGUMENTS, Traced, check_arity, keep, trace, understood
from flexsparse.watching import Watch

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def judging(cls: Any, trace: Callable[[Any], object]) -> Any:
    """``__post_init__`` of a class of rules: its own, then a trace of the finished rule.

    A class that calls its parent's meets the parent's judging before it is whole: only that of the
    rule's own class traces.
    """
    own = cls.__post_init__

    def judged(self: Any) -> None:
        own(self)
        if type(self).__post_init__ is judged:
            trace(self)

    return judged


def refuse_undecorated(cls: type, given: bool, error: type[FlexSparseError] = RuleError) -> None:
    """Tells who gave values to a class of fields that nobody made a dataclass, or defaults of its own."""
    if "__dataclass_fields__" in cls.__dict__ or "__init__" in cls.__dict__:
        return
    fields = inspect.get_annotations(cls)
    inherited = fields.keys() & getattr(cls, "__dataclass_fields__", {}).keys()
    if inherited or (given and fields):
        raise error(
            f"{cls.__name__} has fields ({', '.join(fields)}) but is no dataclass: write "
            "@dataclass(frozen=True, eq=False) above the class"
        )


@dataclass(frozen=True, eq=False)
class MaskRule(Shown):
    """A mask_mod with parameters: write a frozen dataclass with ``__call__(b, h, q_idx, kv_idx)``.

    The instance is the mask_mod: FlexAttention takes it as it is. ``q_idx`` and ``kv_idx`` are
    positions, ``h`` is the query head; the result is a bool tensor, true where the pair may be
    seen. Rules compose with ``&``, ``|`` and ``~``, also with plain functions. A rule that cannot
    be fused is refused when it is made.

    >>> band = MaskRule.of(lambda b, h, q, kv: (q - kv).abs() < 2)
    >>> from flexsparse.viz import picture
    >>> print(picture(band & ~MaskRule.of(lambda b, h, q, kv: kv == 1), 4))
    #...
    #.#.
    ..##
    ..##
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        refuse_undecorated(cls, bool(values or named))
        return super().__new__(cls)

    def __init_subclass__(cls, *, judged: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Its own by this: a dataclass would write another, with every entry of a tensor.
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]
        if judged:
            cls.__post_init__ = judging(cls, lambda rule: trace_rule(rule))  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Judges the user's values, in a subclass."""
        if type(self) is MaskRule:
            trace_rule(self)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise RuleError(
            f"{type(self).__name__} needs a method __call__(self, b, h, q_idx, kv_idx) that says "
            "what may be seen"
        )

    @staticmethod
    def of(mod: MaskMod) -> MaskRule:
        """The rule of a plain mask_mod: a function, a lambda, or any callable of four arguments."""
        return _operand(mod, "MaskRule.of")

    def bind(self, device: torch.device | str) -> Self:
        """The copy that kernels see: numbers as 0-d tensors, tensors on ``device``."""
        bound: Self = moved(lift(self), torch.device(device))
        return bound

    def __and__(self, other: MaskMod) -> MaskRule:
        return _joined(And, self, other, "&")

    def __rand__(self, other: MaskMod) -> MaskRule:
        return _joined(And, other, self, "&")

    def __or__(self, other: MaskMod) -> MaskRule:
        return _joined(Or, self, other, "|")

    def __ror__(self, other: MaskMod) -> MaskRule:
        return _joined(Or, other, self, "|")

    def __invert__(self) -> MaskRule:
        return Not(self)

    def __getstate__(self) -> dict[str, Any]:
        return holdings(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __bool__(self) -> bool:
        raise ArgumentError(
            "a rule has no truth value: write a & b, a | b and ~a instead of and, or and not"
        )

    def __repr__(self) -> str:
        return describe(self)


@dataclass(frozen=True, eq=False, repr=False)
class Function(MaskRule):
    """A plain mask_mod as a rule."""

    mod: MaskMod

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mod(b, h, q_idx, kv_idx)

    def describe(self) -> str:
        return describe(self.mod)


@dataclass(frozen=True, eq=False, repr=False)
class And(MaskRule, judged=False):
    """What all of its rules allow."""

    rules: tuple[MaskRule, ...]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.rules[0](b, h, q_idx, kv_idx)
        for rule in self.rules[1:]:
            seen = seen & rule(b, h, q_idx, kv_idx)
        return seen

    def describe(self) -> str:
        return " & ".join(map(_grouped, self.rules))


@dataclass(frozen=True, eq=False, repr=False)
class Or(MaskRule, judged=False):
    """What any of its rules allows."""

    rules: tuple[MaskRule, ...]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.rules[0](b, h, q_idx, kv_idx)
        for rule in self.rules[1:]:
            seen = seen | rule(b, h, q_idx, kv_idx)
        return seen

    def describe(self) -> str:
        return " | ".join(map(_grouped, self.rules))


@dataclass(frozen=True, eq=False, repr=False)
class Not(MaskRule, judged=False):
    """What the rule forbids."""

    rule: MaskRule

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.rule(b, h, q_idx, kv_idx)

    def describe(self) -> str:
        return f"~{_grouped(self.rule)}"


def _joined(kind: type[And] | type[Or], first: object, second: object, sign: str) -> MaskRule:
    """Rules joined one by one stay one flat list: a thousand calls deep is deeper than Python goes."""
    rules = [_operand(first, sign), _operand(second, sign)]
    flat = ([*rule.rules] if isinstance(rule, kind) else [rule] for rule in rules)
    return kind(tuple(chain.from_iterable(flat)))


def _grouped(rule: MaskRule) -> str:
    text = describe(rule)
    return f"({text})" if isinstance(rule, And | Or) else text


def of_head(value: float | Tensor, h: Tensor) -> float | Tensor:
    """A parameter that is the same for all heads, or the head's own of a tensor ``[Hq]``."""
    return value[h] if isinstance(value, Tensor) and value.ndim == 1 else value


def as_rule(value: object, argument: str = "rule") -> MaskRule | None:
    """What was given as a rule, as a rule; refuses what belongs in another argument."""
    if value is None or isinstance(value, MaskRule):
        return value
    if isinstance(value, Tensor):
        raise ArgumentError(
            f"{argument} must be a rule or a function of (b, h, q_idx, kv_idx), got a tensor "
            f"{describe(value)}: capture it, such as lambda b, h, q, kv: mask[q, kv]"
        )
    if isinstance(value, type):
        raise ArgumentError(
            f"{argument} must be a rule, got the class {value.__name__}: make one, such as "
            f"{value.__name__}(...)"
        )
    if not callable(value):
        instead = {
            "BlockMask": ": pass its mask_mod as rule, and its blocks as a Selection",
            "Selection": ": pass it as select, which joins the rule of the call",
        }
        hint = instead.get(type(value).__name__, "")
        raise ArgumentError(
            f"{argument} must be a rule or a function of (b, h, q_idx, kv_idx), "
            f"got {type(value).__name__}{hint}"
        )
    return Function(value)


def _operand(value: object, sign: str) -> MaskRule:
    rule = as_rule(value, f"the operand of {sign}")
    if rule is None:
        raise ArgumentError(f"the operand of {sign} must be a rule or a function, got None")
    return rule


def trace_rule(rule: MaskRule) -> Traced:
    """The code of ``rule``, with its numbers as tensors wherever Python does not need them."""
    return traced_once(rule, MASK_ARGUMENTS, "rule")


def traced_once(mod: Any, arguments: tuple[str, ...], slot: str) -> Traced:
    """The trace of a mod; inside torch.compile, where nothing can be traced, the last one made.

    Outside it is made anew where a closure may have come to hold something else; a rule whose holdings
    say all about it keeps its trace until they change.
    """
    if torch.compiler.is_compiling():
        made: Traced | None = vars(mod).get(TRACE)
        if made is None:
            raise RuleError(
                f"a {slot} made or composed inside torch.compile: make it outside, as in __init__, and "
                "if it is composed with & | ~ call attention or make_plan with it once before compiling; "
                "fs.attention itself stands inside"
            )
        return made
    try:
        last: Watch | None = vars(mod).get(TRACED_AT)
        # What was settled is so as long as it holds the same.
        if last is not None and last.unchanged():
            again: Traced = vars(mod)[TRACE]
            return again
        known = Watch(mod) if settled(mod) else None
        name = f"{slot} {describe(mod)}"
        check_arity(getattr(mod, "mod", mod), arguments, name)
        traced = trace_lifted(mod, arguments, name)
    except RecursionError:
        raise RuleError(
            f"this {slot} is composed of others deeper than Python can call: join them with one sign "
            "in a row, as in a & b & c, or write one function"
        ) from None
    object.__setattr__(mod, TRACE, traced)
    object.__setattr__(mod, TRACED_AT, known)
    keep(traced)
    return traced


def trace_lifted(mod: Any, arguments: tuple[str, ...], name: str) -> Traced:
    """Traces a mod with its numbers as arguments, where it then means what it means with them as they are.

    In few operations a tensor gives another type than the number does. Such a mod keeps its numbers, and
    is a kernel of its own for each value.
    """
    if not has_numbers(mod):
        return trace(mod, arguments, name)
    traced, meant = understood(mod, arguments, name)
    # What may be seen is decided in single precision, but for what the rule itself keeps in double.
    doubles = "score" not in arguments and traced.has_doubles
    try:
        shared, means = understood(lifted(mod), arguments, name, Lifting(doubles))
    except RuleError:
        return traced
    return shared if alike(meant, means) else traced
