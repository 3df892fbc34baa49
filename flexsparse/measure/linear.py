"""Whether kernel time follows listed tiles: a line through several budgets, and how well it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def line(tiles: Sequence[float], ms: Sequence[float]) -> dict[str, float]:
    """Least squares: ``ms = fixed_ms + us_per_1000_tiles * tiles``, and R².

    >>> {k: round(v, 6) for k, v in line([1000, 2000, 4000], [1.5, 2.5, 4.5]).items()}
    {'fixed_ms': 0.5, 'us_per_1000_tiles': 1000.0, 'r2': 1.0}
    """
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (tiles, ms))
    away, off = x - x.mean(), y - y.mean()
    slope = (away * off).sum() / away.square().sum()
    left = off - slope * away
    r2 = 1 - left.square().sum() / off.square().sum()
    return {
        "fixed_ms": float(y.mean() - slope * x.mean()),
        "us_per_1000_tiles": float(1e6 * slope),
        "r2": float(r2),
    }


def fitted(points: list[dict[str, Any]]) -> dict[str, Any]:
    """``points``, each of some ``tiles`` that took ``kernel_ms``, and their line."""
    return {"points": points} | line([p["tiles"] for p in points], [p["kernel_ms"] for p in points])
