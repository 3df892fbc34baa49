"""Functions compiled whole, for as many forms of arguments as come.

torch specialises a code object, which all closures of one ``def`` share, to strides, global settings and
much else, and after eight such forms refuses any more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any

import torch

_numbers = count()


def compiled_alone(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``function`` by torch.compile with its ``options``, under a code object of its own; under another,
    where torch has specialised that one as often as it does."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    assert isinstance(function, FunctionType)

    def anew() -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            _with_own_code(function), fullgraph=True, **options
        )
        return compiled

    compiled = anew()

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit:
            compiled = anew()
        return compiled(*args, **kwargs)

    return call


def _with_own_code(function: FunctionType) -> FunctionType:
    own = FunctionType(
        function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own
