"""The box: where time goes, and what was compiled."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class CompileCounter:
    """Every kernel that was compiled in this process, by its kind."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def note(self, kind: str) -> None:
        self.kinds.append(kind)

    def __int__(self) -> int:
        return len(self.kinds)


compiles = CompileCounter()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What torch.autocast computes in on ``device``; None where it is off, or unknown."""
    kind = device.type
    # torch.amp.is_autocast_available would say, but cannot be traced.
    if kind not in ("cpu", "cuda", "xpu", "mps") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


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


class Stages:
    """Seconds spent in named stages: index, layout, kernel, movement.

    On CUDA a stage waits for the device before and after, so that it counts its own work alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
