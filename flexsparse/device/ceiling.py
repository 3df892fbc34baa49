"""What a device can do at most, as measured: bytes copied and numbers multiplied in a second."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from flexsparse.device.clock import device_ms

# Much larger than caches, and matrices that fill the device.
_COPIED_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
_SIDE = {"cuda": 8192, "cpu": 1024}


class Ceilings(NamedTuple):
    """``copy_bytes_per_s`` counts each byte of a copy twice, read and written;
    ``matmul_flops_per_s`` a multiplication and an addition as two. ``processors`` share the work."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    processors: int = 1


def ceilings(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """The ceilings of ``device`` for matrices of ``dtype``, measured on first use in a process."""
    device = _indexed(torch.device(device))
    if (told := _known.get((device, dtype))) is not None:
        return told
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Ceilings(_copy(device), _matmul(device, dtype), processors)


# By device and dtype, as measured by another process.
_known: dict[tuple[torch.device, torch.dtype], Ceilings] = {}


def know(device: torch.device, dtype: torch.dtype, found: Ceilings) -> None:
    """Takes the ceilings of ``device`` from who measured them while it was idle."""
    _known[_indexed(device), dtype] = found


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def _copy(device: torch.device) -> float:
    size = _COPIED_BYTES[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (1e-3 * device_ms(lambda: target.copy_(source), device))


@cache
def _matmul(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / (1e-3 * device_ms(lambda: torch.mm(a, b, out=out), device))
