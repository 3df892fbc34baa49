"""What the last queries of a call attend to: the sample from which causal patterns are estimated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.rules import MaskMod, as_rule
from flexsparse.selectors.covering import precise


class Sample(NamedTuple):
    """``weights [B, Hq, n, S]``, ``seen`` of the same shape, and ``positions [B or 1, n]``."""

    weights: Tensor
    seen: Tensor
    positions: Tensor


def last_queries(
    q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None, count: int, scale: float | None
) -> Sample:
    """Exact softmax weights of the last ``count`` queries, causal and under the rule.

    A query that sees nothing has weights 0. Takes ``count`` times S for each head.
    """
    count = min(count, q.shape[2])
    kv = torch.arange(grid.kv_len, device=q.device)
    positions = grid.positions(q.device)[:, -count:]
    at = positions[:, None, :, None]
    seen = kv <= at
    if (ruled := as_rule(rule)) is not None:
        b = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1)
        h = torch.arange(q.shape[1], device=q.device).view(1, -1, 1, 1)
        seen = seen & ruled(b, h, at, kv)
    scores = products(precise(q[:, :, -count:]), precise(k))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return Sample(weights, seen.expand_as(weights), positions)


def products(q: Tensor, k: Tensor) -> Tensor:
    """``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]`` -> ``[B, Hq, Q, S]``, no key head repeated."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores: Tensor = grouped @ k[:, :, None].mT
    return scores.flatten(1, 2)


def by_distance(sample: Sample) -> Tensor:
    """``[B, Hq, S]``: the weights summed over each diagonal, distance 0 (the query itself) first.

    >>> weights = torch.tensor([[[[0.25, 0.75, 0.0], [0.5, 0.0, 0.5]]]])
    >>> by_distance(Sample(weights, weights > 0, torch.tensor([[1, 2]])))
    tensor([[[1.2500, 0.2500, 0.5000]]])
    """
    weights = sample.weights
    distance = torch.arange(weights.shape[-1], device=weights.device)
    # Gathered, not scattered: the order of summation is the same on every run.
    key = sample.positions[:, None, :, None] - distance
    inside = (key >= 0) & (key < weights.shape[-1])
    found = weights.gather(-1, key.clamp(0, weights.shape[-1] - 1).expand_as(weights))
    return (found * inside).sum(2)
