"""How large the terms are that each quantity sums.

A sum of large terms that cancel is off by the rounding of the terms, not of the answer: a gradient
that is exactly zero, computed as a difference, is not. What an honest computation may be off by is
therefore a few roundings of these sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.reference import allowed, pair_indices
from flexsparse.scores import as_score


@torch.no_grad()
def term_sizes(
    inputs: Mapping[str, Tensor],
    learned: Mapping[str, Tensor],
    weights: tuple[Tensor, Tensor],
    rows: Tensor,
    common: Mapping[str, Any],
) -> dict[str, float]:
    """The largest sum of absolute terms in out, lse, and each gradient, for the queries ``rows``."""
    q, k, v = (inputs[name].detach().double() for name in ("q", "k", "v"))
    grid = Grid(q.shape[2], k.shape[2], q_offset=common["q_offset"], batch=q.shape[0])
    kv_heads = k.shape[1]
    seen = allowed(
        grid,
        q.shape[1],
        rule=common["rule"],
        select=common["select"],
        fallback=common["fallback"],
        rows=rows,
    )

    def packed(x: Tensor) -> Tensor:
        return rearrange(x, "b (g r) n d -> b g (r n) d", g=kv_heads)

    def unpacked(x: Tensor) -> Tensor:
        return rearrange(x, "b g (r n) d -> b (g r) n d", n=len(rows))

    q = q[:, :, rows]
    hidden = ~packed(seen).any(2)[..., None]
    k, v = (x.masked_fill(hidden, 0) for x in (k, v))
    scale = common["scale"] or q.shape[-1] ** -0.5
    raw = unpacked(packed(q) @ k.mT) * scale
    score, steep = raw, torch.ones_like(raw)
    rule = as_score(common["score"])
    if rule is not None:
        at = pair_indices(grid, q.shape[1], rows)
        with torch.enable_grad():
            leaf = raw.requires_grad_()
            score = rule(leaf, *at).double().broadcast_to(leaf.shape)
            steep = _slope(score, leaf).abs()
    weight = score.detach().masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    d_out, d_lse = (w.double().abs() for w in weights)
    mixed = unpacked(packed(weight) @ v.abs())
    own = (d_out * mixed).sum(-1) + d_lse
    flow = weight * (unpacked(packed(d_out) @ v.abs().mT) + own[..., None])
    sizes = {
        "out": mixed,
        "lse": score.detach().abs().masked_fill(~seen, 0),
        "dq": packed(flow * steep) @ k.abs() * scale,
        "dk": packed(flow * steep).mT @ packed(q.abs()) * scale,
        "dv": packed(weight).mT @ packed(d_out),
        "dsink": own.sum((0, 2)),
    }
    named = {f"d{name}": x for name, x in learned.items() if name != "sink"}
    for name, x in named.items():
        # Positive flow into a positive and a negative derivative would cancel, so both are taken.
        parts = [
            torch.autograd.grad(score, x, (flow * side), retain_graph=True, allow_unused=True)[0]
            for side in _sides(score, raw)
        ]
        sizes[name] = sum((p.double().abs() for p in parts if p is not None), torch.zeros(()))
    return {name: float(x.max()) if x.numel() else 0.0 for name, x in sizes.items()}


def _slope(score: Tensor, raw: Tensor) -> Tensor:
    """How each score changes with its raw score: not at all, for a rule that forgets it."""
    if not score.requires_grad:
        return torch.zeros_like(raw)
    slope = torch.autograd.grad(score.sum(), raw, retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(raw) if slope is None else slope


def _sides(score: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs whose score was raised, and those whose score was lowered: the two signs of most rules."""
    raised = (score >= raw).detach()
    return raised, ~raised
