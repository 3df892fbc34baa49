"""The precision that a device computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What torch.autocast computes in on ``device``; None where it is off, or unknown."""
    kind = device.type
    # torch.amp.is_autocast_available would say, but cannot be traced.
    if kind not in ("cpu", "cuda", "xpu", "mps") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Where torch.autocast is off on ``device``; entering costs nothing where it already is."""
    if not torch.compiler.is_compiling() and autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
