"""Where the time of a call goes, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stages:
    """Seconds spent in named stages: index, layout, kernel, movement.

    On CUDA a stage lies between two events of the current stream, and nothing waits until the
    seconds are read: what the device still does of earlier stages is not counted, what it waits for
    the host is. Elsewhere it is the host's clock.

    >>> stages = Stages(torch.device("cpu"))
    >>> for name in ("index", "kernel", "kernel"):
    ...     with stages.stage(name):
    ...         pass
    >>> sorted(stages.seconds)
    ['index', 'kernel']
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: dict[str, float] = {}
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to ``name``, also where the block raises."""
        if self.device.type == "cuda":
            yield from self._between_events(name)
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)

    def _between_events(self, name: str) -> Iterator[None]:
        stream = torch.cuda.current_stream(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self._pending.append((name, start, end))

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, the sum of all its blocks. On CUDA, waits once for the device."""
        if self._pending:
            torch.cuda.synchronize(self.device)
            for name, start, end in self._pending:
                self._add(name, start.elapsed_time(end) / 1e3)
            self._pending.clear()
        return dict(self._seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
