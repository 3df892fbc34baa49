"""The dense truth: every score in fp64, a mask in full, one softmax. Nothing optimised imports this."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from flexsparse.arguments import Fallback
from flexsparse.grid import Grid
from flexsparse.merge import Partial, with_sink
from flexsparse.rules import MaskMod, as_rule
from flexsparse.scores import ScoreMod, as_score
from flexsparse.selection import Selection


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: MaskMod | None = None,
    select: Selection | None = None,
    score: ScoreMod | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    sink: Tensor | None = None,
    fallback: Fallback = None,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Partial:
    """Attention as its definition reads. Differentiable; memory grows with Q times S.

    ``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]``, ``v [B, Hkv, S, Dv]`` -> out ``[B, Hq, Q, Dv]``, lse
    ``[B, Hq, Q]``. ``rows`` (query indices ``[n]``) computes only those queries. ``dtype`` other
    than fp64 gives the plain low-precision computation that errors are judged by.
    """
    grid = Grid(q.shape[2], k.shape[2], q_offset=q_offset, batch=q.shape[0])
    rows = torch.arange(grid.q_len, device=q.device) if rows is None else rows
    seen = allowed(grid, q.shape[1], rule=rule, select=select, fallback=fallback, rows=rows)
    q, k, v = (x.to(dtype) for x in (q[:, :, rows], k, v))
    heads, kv_heads = q.shape[1], k.shape[1]
    # A key that no query sees may hold anything, and 0 times NaN is NaN.
    hidden = ~rearrange(seen, "b (g r) n s -> b g (r n) s", g=kv_heads).any(2)[..., None]
    k, v = (x.masked_fill(hidden, 0) for x in (k, v))
    # The query heads of a KV head are rows of one product, so that keys need no copies.
    q = rearrange(q, "b (g r) n d -> b g (r n) d", g=kv_heads)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = rearrange(scores, "b g (r n) s -> b (g r) n s", n=len(rows))
    if (scored := as_score(score)) is not None:
        scores = scored(scores, *pair_indices(grid, heads, rows)).to(dtype)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(torch.where(seen.any(-1, keepdim=True), scores, 0.0), -1)
    lse = torch.where(seen.any(-1), lse, -torch.inf)
    weights = (scores - torch.where(lse == -torch.inf, 0, lse)[..., None]).exp()
    weights = rearrange(weights, "b (g r) n s -> b g (r n) s", g=kv_heads)
    out = rearrange(weights @ v, "b g (r n) d -> b (g r) n d", n=len(rows))
    part = Partial(out, lse)
    return part if sink is None else with_sink(part, sink.to(dtype))


def allowed(
    grid: Grid,
    heads: int,
    *,
    rule: MaskMod | None = None,
    select: Selection | None = None,
    fallback: Fallback = None,
    rows: Tensor,
) -> Tensor:
    """bool ``[B, Hq, n, S]``: rule and selection, pair by pair, for the query indices ``rows``."""
    b, h, position, key = pair_indices(grid, heads, rows)
    shape = (grid.batch, heads, len(rows), grid.kv_len)
    ruled = torch.ones(shape, dtype=torch.bool, device=rows.device)
    if (seen_by := as_rule(rule)) is not None:
        ruled = ruled & seen_by(b, h, position, key)
    if select is None:
        return ruled
    chosen = select.dense(rows)
    chosen = chosen.expand(grid.batch, -1, -1, -1).repeat_interleave(heads // chosen.shape[1], 1)
    seen = ruled & chosen
    if fallback is not None:
        reach = 1 if fallback == "self" else fallback[1]
        near = (position - key >= 0) & (position - key < reach)
        seen = torch.where(seen.any(-1, keepdim=True), seen, ruled & near)
    return seen


def pair_indices(grid: Grid, heads: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence, query head, position of the query and of the key; they broadcast to every pair."""
    b = torch.arange(grid.batch, device=rows.device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=rows.device).view(1, -1, 1, 1)
    position = grid.positions(rows.device)[:, rows].view(-1, 1, len(rows), 1)
    return b, h, position, torch.arange(grid.kv_len, device=rows.device).view(1, 1, 1, -1)
