"""What a call costs: with the host's launches, in a CUDA graph, and in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexsparse.device.clock import Call, device_ms, graph_ms, peak_bytes, wall_ms

# In a longer call launches are nothing, and a graph of several of them may not fit.
_LONG_MS = 100.0


class Cost(NamedTuple):
    """Medians in ms. ``eager_ms`` is the device's time, ``wall_ms`` the caller's, ``graph_ms`` the
    device's inside a CUDA graph, or ``no_graph`` why there is none."""

    eager_ms: float
    wall_ms: float
    graph_ms: float | None
    no_graph: str | None
    peak_bytes: int | None

    @property
    def best_ms(self) -> float:
        """In a graph where there is one."""
        return self.eager_ms if self.graph_ms is None else self.graph_ms


def cost(call: Call, device: torch.device, no_graph: str | None = None) -> Cost:
    """``no_graph`` says why a graph is not tried, where that is known."""
    eager = device_ms(call, device)
    if device.type != "cuda":
        return Cost(eager, eager, None, "no CUDA device", None)
    wall, peak = wall_ms(call, device), peak_bytes(call, device)
    captured, why = None, no_graph
    if why is None and eager > _LONG_MS:
        why = f"longer than {_LONG_MS:g} ms"
    if why is None:
        try:
            captured = graph_ms(call)
        except Exception as error:  # whatever torch or CUDA finds while it captures
            why = first_line(error)
    return Cost(eager, wall, captured, why, peak)


def first_line(error: Exception) -> str:
    """An error in one line, as a cell of a table holds it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
