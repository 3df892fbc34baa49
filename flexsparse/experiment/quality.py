"""What a row keeps of dense attention: its mass, and its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexsparse.arguments import Fallback
from flexsparse.experiment.model import QKV
from flexsparse.grid import Grid
from flexsparse.reference import allowed
from flexsparse.rules import MaskRule
from flexsparse.selection import Selection

# Pairs held at a time: 64 MB of fp32 scores.
_PAIRS = 1 << 24


@torch.no_grad()
def quality(
    qkv: QKV,
    out: Tensor,
    grid: Grid,
    baseline: MaskRule | None,
    *,
    rule: MaskRule | None,
    select: Selection | None,
    fallback: Fallback,
) -> dict[str, Any]:
    """``mass_kept``: the part of the baseline's softmax weights on the row's pairs, a mean over the
    queries that see anything. ``output_error``: ``|out - dense| / |dense|``, Frobenius norms.
    ``pairs_outside``: pairs that the row sees and the baseline does not. ``pairs_dropped``: pairs of
    the rule that the selection leaves out; None without one.

    ``out [B, Hq, Q, Dv]``. The baseline is the plain dense computation, without a score.
    """
    q, k, v = (x.float() if x.dtype != torch.float64 else x for x in qkv)
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    chunk = max(1, _PAIRS // (grid.batch * heads * grid.kv_len))
    kept = queries = off = size = 0.0
    outside = dropped = 0
    for rows in torch.split(torch.arange(grid.q_len, device=q.device), chunk):
        dense = allowed(grid, heads, rule=baseline, rows=rows)
        seen = allowed(grid, heads, rule=rule, select=select, fallback=fallback, rows=rows)
        scores = (q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5).masked_fill_(~dense, -torch.inf)
        weights = scores.softmax(-1).nan_to_num_(0.0)
        truth = weights @ v
        kept += float((weights * seen).sum())
        queries += float(dense.any(-1).sum())
        outside += int((seen & ~dense).sum())
        if select is not None:
            dropped += int((allowed(grid, heads, rule=rule, rows=rows) & ~seen).sum())
        off += float((out[:, :, rows].to(truth.dtype) - truth).square().sum())
        size += float(truth.square().sum())
    return {
        "mass_kept": kept / queries if queries else None,
        "output_error": (off / size) ** 0.5 if size else None,
        "pairs_outside": outside,
        "pairs_dropped": None if select is None else dropped,
    }
