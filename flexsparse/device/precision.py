"""The precision that a device computes in."""

from __future__ import annotations

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What torch.autocast computes in on ``device``; None where it is off, or unknown."""
    kind = device.type
    # torch.amp.is_autocast_available would say, but cannot be traced.
    if kind not in ("cpu", "cuda", "xpu", "mps") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
