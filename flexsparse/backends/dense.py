"""All pairs by torch's scaled_dot_product_attention: for calls in which skipping does not pay.

Without rule and selection, or exactly causal, that is its fastest kernel; else it is given the pairs that
are seen as a boolean mask. It has no lse and no score rules: with them scores are computed in plain torch,
some queries at a time, and again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from flexsparse.backends import Call, Work
from flexsparse.backends.gathered import BYTES_AT_ONCE
from flexsparse.backends.walk import computing
from flexsparse.errors import BackendError
from flexsparse.grid import Grid
from flexsparse.layout import Layout
from flexsparse.program import MaskProgram
from flexsparse.tracing import Traced

name = "dense"

MOST_PAIRS = 2**31
# Both ways to write the rule that torch has a kernel for, as they are recorded.
_CAUSAL = frozenset(
    f"def mod(b, h, q_idx, kv_idx):\n    v0 = torch.ops.aten.{said}\n    return v0\n"
    for said in ("le.Tensor(kv_idx, q_idx)", "ge.Tensor(q_idx, kv_idx)")
)


def refuses(call: Call) -> str | None:
    """Nothing before the mask is to be made: that may be too large."""
    return None


def tile_for(tile: tuple[int, int], call: Call) -> tuple[int, int]:
    """Any: it visits none."""
    return tile


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    layout, (q, k, v) = work.layout, (work.q, work.k, work.v)
    plain = work.score is None and not work.lse
    causal = without_mask(layout, plain)
    if causal is not None:
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=work.scale, enable_gqa=grouped
        )
        return out, None
    seen = _seen(layout, (q.shape[0], q.shape[1]))
    shared = seen.expand(q.shape[0], q.shape[1], -1, -1)
    unseen = ~shared.unflatten(1, (k.shape[1], -1)).any(3).any(2)[..., None]
    # Every key takes part in a product here, and 0 times NaN is NaN.
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    if not plain:
        return _in_parts(work, k, v, seen)
    # A row of nothing is NaN to some kernels: it sees all, and counts for nothing.
    alone = ~seen.any(-1, keepdim=True)
    # With masks torch's fast kernels take one KV head for each query head.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen | alone, scale=work.scale)
    return out.masked_fill(alone, 0), None


def without_mask(layout: Layout, plain: bool) -> bool | None:
    """Whether torch's kernel is causal where it runs a call without a mask, else None; ``plain``: there
    is no score rule, and no lse is asked for."""
    rows_are_queries = layout.address.rows_per_query == 1
    if not plain or not rows_are_queries:
        return None
    return known(layout.program, layout.grid, selected=layout.select is not None)


def known(program: MaskProgram, grid: Grid, *, selected: bool) -> bool | None:
    """Whether torch has a kernel for what is seen: False for all pairs, True for causal ones."""
    if selected:
        return None
    if program.rule is None:
        return False
    aligned = isinstance(grid.q_offset, int) and grid.q_offset == grid.kv_len - grid.q_len
    if not is_causal(program.rule) or not aligned or grid.q_len not in (1, grid.kv_len):
        return None
    # One query at the last key sees everything.
    return grid.q_len > 1


def is_causal(rule: Traced) -> bool:
    """Whether a rule is that each query sees the keys up to its own position, and says nothing else."""
    return rule.code in _CAUSAL


def _seen(layout: Layout, axes: tuple[int, int]) -> Tensor:
    """bool ``[B or 1, H or 1, Q, S]`` in kernel coordinates: every pair, asked."""
    own = layout.kv_num_blocks.shape[:2]
    rows = layout.span.q_len
    pairs = math.prod(own) * rows * layout.grid.kv_len
    if pairs > MOST_PAIRS:
        raise BackendError(
            f"backend 'dense' would make a mask of {pairs} pairs, more than {MOST_PAIRS}: use "
            "backend='tiles' or backend='auto'"
        )
    device = layout.kv_indices.device
    sizes = (*own, rows, layout.grid.kv_len)
    at = [
        torch.arange(n, device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(sizes)
    ]
    b, h, row, kv = at
    return layout.mask_mod(b, h, row, kv).expand(sizes)


def _in_parts(work: Work, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | None]:
    q = work.q
    cost = q.shape[0] * q.shape[1] * k.shape[2] * 4 * computing(q).itemsize
    at_once = max(1, BYTES_AT_ONCE.get(q.device.type, 2**25) // cost)
    parts = []
    for first in range(0, q.shape[2], at_once):
        rows = slice(first, min(first + at_once, q.shape[2]))
        part = partial(_part, work, first)
        # What it is given, torch holds against what it was when the backward computes it again.
        kept = partial(checkpoint, part, use_reentrant=False) if work.grads else part
        parts.append(kept(q[:, :, rows], k, v, seen[:, :, rows], *work.score_tables))
    out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return out, lse if work.lse else None


def _part(
    work: Work, first: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *tables: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of some queries, and its lse."""
    dtype, out_dtype = computing(q), q.dtype
    batch, heads, rows, _ = q.shape
    q, k, v = (x.to(dtype) for x in (q, k, v))
    # The query heads of a KV head are rows of one product, so that keys need no copies.
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ k.mT * work.scale).view(batch, heads, rows, -1)
    if work.score is not None:
        scores = _rescored(work, scores, first, tables)
    scores = scores.masked_fill(~seen, -torch.inf)
    some = (scores > -torch.inf).any(-1, keepdim=True)
    base = torch.logsumexp(torch.where(some, scores, 0), -1, keepdim=True)
    weight = torch.where(some, (scores - base).exp(), 0)
    out = weight.view(batch, k.shape[1], -1, k.shape[2]) @ v
    lse = torch.where(some, base, -torch.inf)[..., 0]
    return out.view(batch, heads, rows, -1).to(out_dtype), lse


def _rescored(work: Work, scores: Tensor, first: int, tables: Sequence[Tensor]) -> Tensor:
    assert work.score is not None
    batch, heads, rows, keys = scores.shape
    device = scores.device
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    row = torch.arange(first, first + rows, device=device).view(-1, 1)
    changed = work.score.mod(tables)(scores, b, h, row, torch.arange(keys, device=device))
    # A score that ignores the old one need not vary with the pair.
    return changed.to(scores.dtype).broadcast_to(scores.shape)
