"""A flag that a kernel raises in the host's own memory, which costs nobody a launch or a copy to ask for."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _Kept(threading.local):
    """This thread's flag of pinned memory, lowered."""

    flag: Tensor | None = None


_kept = _Kept()


class Raised:
    """``flag``, int32 ``[1]``: 0 until a kernel of the current stream of ``device`` writes 1."""

    def __init__(self, device: torch.device) -> None:
        self.device, flag = device, None
        self._far = device.type == "cuda"
        if self._far:
            # Whoever asks has it until it is heard: one that fails on its way is kept by nobody.
            flag, _kept.flag = _kept.flag, None
        self.flag = flag if flag is not None else self._lowered()

    def _lowered(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, pin_memory=self._far)

    def heard(self) -> bool:
        """Waits for what is queued, and asks."""
        if self._far:
            torch.cuda.current_stream(self.device).synchronize()
        raised = bool(self.flag)
        if self._far and not raised:
            _kept.flag = self.flag
        return raised
