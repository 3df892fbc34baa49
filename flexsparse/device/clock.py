"""Medians of repeated calls, by the timers of torch and Triton."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

# A call as long as this is timed once: repeating it would say little and take minutes.
_LONG_MS = 1000.0


def device_ms(call: Call, device: torch.device) -> float:
    """Median ms of ``call`` after one that warms up.

    On CUDA the time between events around each call, with a cleared L2 cache and no wait by the
    host; elsewhere the host's clock.
    """
    once = _once(call, device)
    if once >= _LONG_MS:
        return once
    if device.type == "cuda":
        from triton.testing import do_bench

        # Events belong to the current device.
        with torch.cuda.device(device):
            return float(do_bench(call, return_mode="median"))
    return _median(call, device)


def wall_ms(call: Call, device: torch.device) -> float:
    """Median ms of ``call`` as its caller sees it: until the device is done."""
    once = _once(call, device)
    return once if once >= _LONG_MS else _median(call, device)


def graph_ms(call: Call) -> float:
    """Median ms of ``call`` inside a CUDA graph: the device's work without the host's launches.

    Whatever cannot be captured raises, as torch says it.
    """
    from triton.testing import do_bench_cudagraph

    # Compiling, and whatever else a first call does, cannot be captured.
    call()
    torch.cuda.synchronize()
    try:
        return float(do_bench_cudagraph(call, return_mode="median"))
    except Exception:
        _forget_capture()
        raise


def captured_ms(call: Call) -> float | None:
    """The same, None of what cannot be captured."""
    try:
        return graph_ms(call)
    except Exception:  # whatever torch or CUDA finds while it captures
        return None


def _forget_capture() -> None:
    """A capture that fails leaves torch's default generator believing in it: it gets a new state."""
    index = torch.cuda.current_device()
    known = torch.cuda.default_generators[index]
    fresh = torch.Generator(torch.device("cuda", index)).manual_seed(known.initial_seed())
    known.graphsafe_set_state(fresh.graphsafe_get_state())


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Bytes of device memory that ``call`` takes at most beside what was there; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free; what torch's allocator keeps for later is given up for it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _once(call: Call, device: torch.device) -> float:
    """ms of a second call, the device's work included."""
    call()
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return 1e3 * (time.perf_counter() - start)


def _median(call: Call, device: torch.device) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer(
        "call(); wait(device)",
        globals={"call": call, "wait": _wait, "device": device},
        num_threads=torch.get_num_threads(),
    )
    return 1e3 * float(timer.blocked_autorange().median)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
