"""What was compiled: a kernel costs seconds, so each is counted, and none specialises another's code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any


class CompileCounter:
    """Every kernel that was compiled in this process, by its kind."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def note(self, kind: str) -> None:
        self.kinds.append(kind)

    def __int__(self) -> int:
        return len(self.kinds)


compiles = CompileCounter()
_numbers = count()


def alone(function: Callable[..., Any]) -> FunctionType:
    """``function`` under a code object of its own, to be compiled.

    torch counts specialisations per code object, which all closures of one ``def`` share, and gives up
    after eight of them.
    """
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own
