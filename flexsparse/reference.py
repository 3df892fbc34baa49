"""The dense truth: every score in fp64, a mask in full, one softmax. Nothing optimised imports this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from flexsparse.arguments import (
    Empty,
    Fallback,
    check_empty,
    check_fallback,
    check_qkv,
    check_scale,
    check_selection,
    check_sink,
)
from flexsparse.errors import EmptyRowError
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
    select: Any = None,
    score: ScoreMod | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    sink: Tensor | None = None,
    fallback: Fallback = None,
    empty: Empty = "zero",
    sanitize: bool = False,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Partial:
    """Attention as its definition reads. Differentiable; memory grows with Q times S.

    ``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]``, ``v [B, Hkv, S, Dv]`` -> out ``[B, Hq, Q, Dv]``, lse
    ``[B, Hq, Q]``. Keys that no query sees never matter here, so ``sanitize`` changes nothing. ``rows`` (query indices ``[n]``) computes only those queries. ``dtype`` other
    than fp64 gives the plain low-precision computation that errors are judged by.
    """
    check_qkv(q, k, v)
    grid = Grid(q.shape[2], k.shape[2], q_offset=q_offset, batch=q.shape[0])
    heads, kv_heads = q.shape[1], k.shape[1]
    scale, sink = check_scale(scale, q.shape[3]), check_sink(sink, heads, q.device)
    select = selected(select, q, k, grid, rule)
    rows = torch.arange(grid.q_len, device=q.device) if rows is None else rows
    seen = allowed(grid, heads, rule=rule, select=select, fallback=fallback, rows=rows)
    if check_empty(empty) == "error" and not bool(seen.any(-1).all()):
        b, h, row = (int(i) for i in (~seen.any(-1)).nonzero()[0])
        raise EmptyRowError(f"query {int(rows[row])} of batch {b}, head {h} sees no key")
    q, k, v = (x.to(dtype) for x in (q[:, :, rows], k, v))
    # A key that no query sees may hold anything, and 0 times NaN is NaN.
    hidden = ~rearrange(seen, "b (g r) n s -> b g (r n) s", g=kv_heads).any(2)[..., None]
    k, v = (x.masked_fill(hidden, 0) for x in (k, v))
    # The query heads of a KV head are rows of one product, so that keys need no copies.
    q = rearrange(q, "b (g r) n d -> b g (r n) d", g=kv_heads)
    scores = q @ k.mT * scale
    scores = rearrange(scores, "b g (r n) s -> b (g r) n s", n=len(rows))
    if (scored := as_score(score)) is not None:
        with single_precision():
            scored_as = scored(scores, *pair_indices(grid, heads, rows))
        scores = scored_as.to(dtype).broadcast_to(scores.shape)
    scores = scores.masked_fill(~seen, -torch.inf)
    # Of a row without weight, whose scores are all -inf, logsumexp has no derivative.
    weighty = (scores != -torch.inf).any(-1)
    lse = torch.logsumexp(torch.where(weighty[..., None], scores, 0.0), -1)
    lse = torch.where(weighty, lse, -torch.inf)
    weights = (scores - torch.where(lse == -torch.inf, 0, lse)[..., None]).exp()
    weights = rearrange(weights, "b (g r) n s -> b g (r n) s", g=kv_heads)
    out = rearrange(weights @ v, "b g (r n) d -> b (g r) n d", n=len(rows))
    part = Partial(out, lse)
    return part if sink is None else with_sink(part, sink.to(dtype))


def selected(
    select: Any, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None
) -> Selection | None:
    """The selection of a call, judged; a selector's, where one was given."""
    if hasattr(select, "select") and not isinstance(select, type | Tensor):
        select = select.select(q, k, grid, rule)
    return None if select is None else check_selection(select, grid, (q.shape[1], k.shape[1]))


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
        with single_precision():
            ruled = ruled & seen_by(b, h, position, key)
    if select is None:
        return ruled
    chosen = select.dense(rows)
    chosen = chosen.expand(grid.batch, -1, -1, -1).repeat_interleave(heads // chosen.shape[1], 1)
    seen = ruled & chosen
    if (reach := check_fallback(fallback)) is not None:
        near = (position - key >= 0) & (position - key < reach)
        seen = torch.where(seen.any(-1, keepdim=True), seen, ruled & near)
    return seen


@contextmanager
def single_precision() -> Iterator[None]:
    """Floats beside positions are fp32, as in a kernel, whatever the user's default is."""
    before = torch.get_default_dtype()
    if before == torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def pair_indices(grid: Grid, heads: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence, query head, position of the query and of the key; they broadcast to every pair."""
    b = torch.arange(grid.batch, device=rows.device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=rows.device).view(1, -1, 1, 1)
    position = grid.positions(rows.device)[:, rows].view(-1, 1, len(rows), 1)
    return b, h, position, torch.arange(grid.kv_len, device=rows.device).view(1, 1, 1, -1)
