"""Tensors that outlive the mode in which they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def lasting(function: Callable[P, R]) -> Callable[P, R]:
    """What ``function`` makes is kept beyond the call: in inference mode too it makes tensors which
    later take part in gradients."""

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return made
