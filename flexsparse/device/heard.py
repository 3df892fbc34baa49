"""A number of the device, heard by the host without waiting for what was queued behind it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_its_way(number: Tensor) -> Callable[[], int]:
    """Sends an integer to the host, which goes on; what comes back waits until it is there."""
    if not number.is_cuda:
        return lambda: int(number)
    # Into pinned memory, as torch does for a copy that does not block.
    here = number.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(number.device))

    def heard() -> int:
        arrived.synchronize()
        return int(here)

    return heard
