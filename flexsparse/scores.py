"""How scores change: a score_mod with parameters, and its composition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, RuleError
from flexsparse.parameters import describe, holdings, lift, moved
from flexsparse.rules import MaskRule, judging, refuse_undecorated, traced_once
from flexsparse.shown import Shown
from flexsparse.tracing import SCORE_ARGUMENTS, Traced

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ScoreRule(Shown):
    """A score_mod with parameters: a frozen dataclass with ``__call__(score, b, h, q_idx, kv_idx)``.

    The score arrives scaled; what is returned goes into the softmax, and masking comes after it.
    ``a >> b`` applies a, then b. Tensors that require gradients get them.

    >>> halve = ScoreRule.of(lambda score, b, h, q, kv: score / 2)
    >>> add = ScoreRule.of(lambda score, b, h, q, kv: score + 1)
    >>> (halve >> add)(*(torch.tensor(4.0) for _ in range(5))).item()
    3.0
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        refuse_undecorated(cls, bool(values or named))
        return super().__new__(cls)

    def __init_subclass__(cls, *, judged: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Its own by this: a dataclass would write another, with every entry of a tensor.
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]
        if judged:
            cls.__post_init__ = judging(cls, lambda rule: trace_score(rule))  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Judges the user's values, in a subclass."""
        if type(self) is ScoreRule:
            trace_score(self)

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        raise RuleError(
            f"{type(self).__name__} needs a method __call__(self, score, b, h, q_idx, kv_idx) that "
            "returns the new score"
        )

    @staticmethod
    def of(mod: ScoreMod) -> ScoreRule:
        """The score rule of a plain score_mod."""
        return _operand(mod, "ScoreRule.of")

    def bind(self, device: torch.device | str) -> Self:
        """The copy that kernels see: numbers as 0-d tensors, tensors on ``device``."""
        bound: Self = moved(lift(self), torch.device(device))
        return bound

    def __rshift__(self, other: ScoreMod) -> ScoreRule:
        return Chain(self, _operand(other, ">>"))

    def __rrshift__(self, other: ScoreMod) -> ScoreRule:
        return Chain(_operand(other, ">>"), self)

    def __getstate__(self) -> dict[str, Any]:
        return holdings(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return describe(self)


@dataclass(frozen=True, eq=False, repr=False)
class Function(ScoreRule):
    """A plain score_mod as a score rule."""

    mod: ScoreMod

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return self.mod(score, b, h, q_idx, kv_idx)

    def describe(self) -> str:
        return describe(self.mod)


@dataclass(frozen=True, eq=False, repr=False)
class Chain(ScoreRule, judged=False):
    """One score rule, then another."""

    first: ScoreRule
    second: ScoreRule

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return self.second(self.first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    def describe(self) -> str:
        return f"{describe(self.first)} >> {describe(self.second)}"


def as_score(value: object, argument: str = "score") -> ScoreRule | None:
    """What was given as a score, as a score rule; refuses what belongs in another argument."""
    if value is None or isinstance(value, ScoreRule):
        return value
    if isinstance(value, MaskRule):
        raise ArgumentError(
            f"{argument} must be a score rule, got the mask rule {describe(value)}: pass it as rule="
        )
    if isinstance(value, type):
        raise ArgumentError(
            f"{argument} must be a score rule, got the class {value.__name__}: make one, such as "
            f"{value.__name__}(...)"
        )
    if not callable(value):
        hint = ": capture it, such as lambda s, b, h, q, kv: s + bias[h, q, kv]"
        raise ArgumentError(
            f"{argument} must be a score rule or a function of (score, b, h, q_idx, kv_idx), got "
            f"{describe(value)}{hint if isinstance(value, Tensor) else ''}"
        )
    return Function(value)


def _operand(value: object, sign: str) -> ScoreRule:
    score = as_score(value, f"the operand of {sign}")
    if score is None:
        raise ArgumentError(f"the operand of {sign} must be a score rule or a function, got None")
    return score


def trace_score(score: ScoreRule) -> Traced:
    """The code of ``score``, with its numbers as tensors wherever Python does not need them."""
    return traced_once(score, SCORE_ARGUMENTS, "score")
