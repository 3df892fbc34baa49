"""Rows shared out to processes: what they compile is compiled at once, and then each has the device alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flexsparse.bench.config import Bench, load
from flexsparse.bench.problems import problem
from flexsparse.bench.run import one
from flexsparse.device import Ceilings
from flexsparse.device.ceiling import know
from flexsparse.measure.tried import once, tried

Read = tuple[Path | str, tuple[str, ...], tuple[str, ...]]


def shared(
    bench: Bench, device: torch.device, limits: Ceilings, workers: int
) -> Iterator[dict[str, Any]]:
    """The records of all rows in their order, each by the process that has compiled for it.

    The device's ceilings are those that were measured before there were others on it.
    """
    read = (bench.file, bench.overrides, bench.rows)
    rows = range(len(bench.config.rows))
    with ExitStack() as stack:
        pools: list[Executor] = [
            stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), _alone))
            for _ in range(min(workers, len(rows)))
        ]
        warm = [pools[i % len(pools)].submit(_compiled, read, i, device, limits) for i in rows]
        for waited in warm:
            waited.result()
        for i in rows:
            yield from pools[i % len(pools)].submit(_run, read, i, device, limits).result()


def _alone() -> None:
    """There are as many processes as wanted: torch is to start none of its own to compile in."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compiled(read: Read, i: int, device: torch.device, limits: Ceilings) -> None:
    """Calls what row ``i`` will time, once; what fails is told when it is timed."""
    bench, row = _bench(read), _bench(read).config.rows[i]
    know(device, getattr(torch, bench.config.dtype), limits)
    if row.ways is None:
        return
    with suppress(Exception):
        given = problem(row, bench.rules[i], bench.config, device, bench.selectors[i])
        tried(given, bench.config.seed, bench.config.checked, every=row.ways == "all", clock=once)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _run(read: Read, i: int, device: torch.device, limits: Ceilings) -> list[dict[str, Any]]:
    return list(one(_bench(read), i, device, limits))


@cache
def _bench(read: Read) -> Bench:
    return load(*read)
