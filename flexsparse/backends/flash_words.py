"""Rules in the words that FlashAttention-4's code generator knows, each meaning what torch means.

Its remainder and division of integers follow C, it has no minimum or maximum, and it keeps a place in a
table in 32 bits, however many it was computed in. What is written here is right whichever way an integer
division rounds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexsparse.program import MaskProgram, ScoreProgram
from flexsparse.tracing import Traced, function_of

# What it has been seen to lower, and to compute as torch does.
KNOWN = frozenset({"_to_copy", "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "div", "eq",
    "exp", "full", "ge", "gt", "index", "le", "log", "logical_and", "logical_not", "logical_or", "lt",
    "mul", "ne", "neg", "rsub", "scalar_tensor", "sub", "tanh", "where"})  # fmt: skip
Operand = Any


def minimum(a: Operand, b: Operand) -> Tensor:
    return torch.where((a < b) | (a != a), a, b)


def maximum(a: Operand, b: Operand) -> Tensor:
    return torch.where((a > b) | (a != a), a, b)


def clamp(x: Tensor, min: Operand = None, max: Operand = None) -> Tensor:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def clamp_min(x: Tensor, min: Operand) -> Tensor:
    return maximum(x, min)


def clamp_max(x: Tensor, max: Operand) -> Tensor:
    return minimum(x, max)


def remainder(a: Operand, d: Operand) -> Tensor:
    left: Tensor = a % d
    return torch.where((left != 0) & ((left < 0) != (d < 0)), left + d, left)


def floor_divide(a: Operand, d: Operand) -> Tensor:
    quotient: Tensor = a // d
    back = quotient * d
    above = ((back > a) & (d > 0)) | ((back < a) & (d < 0))
    return torch.where(above, quotient - 1, quotient)


def read(table: Tensor, *places: Tensor) -> Tensor:
    return table[tuple(place.to(torch.int32) for place in places)]


WORDS = {
    word.__name__: word
    for word in (minimum, maximum, clamp, clamp_min, clamp_max, remainder, floor_divide)
}
_OPERATION = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+\(")
_READ = re.compile(r"= (\w+)\[([^\]]+)\]")


def unknown(traced: Traced | None) -> list[str]:
    """The operations of a mod that have no word here."""
    if traced is None:
        return []
    return sorted(set(_OPERATION.findall(traced.code)) - KNOWN - WORDS.keys())


def mask_in_words(program: MaskProgram) -> MaskProgram:
    rule = None if program.rule is None else _in_words(program.rule)
    return replace(program, rule=rule)


def score_in_words(program: ScoreProgram) -> ScoreProgram:
    return replace(program, score=_in_words(program.score))


def _in_words(traced: Traced) -> Traced:
    return replace(traced, call=_said(traced.code))


@lru_cache(maxsize=256)
def _said(code: str) -> Any:
    def word(found: re.Match[str]) -> str:
        return f"{found[1]}(" if found[1] in WORDS else found[0]

    said = _READ.sub(r"= read(\1, \2)", _OPERATION.sub(word, code))
    return function_of(said, read=read, **WORDS)
