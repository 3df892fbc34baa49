"""The best columns of each row, as a set: rising, unused slots last."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


def top_k(
    score: Tensor,
    width: int,
    *,
    reach: Tensor | None = None,
    forced: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """The ``width`` highest of ``score [B, H, R, C]`` -> int32 ``[B, H, R, width]``, rising, then -1.

    bool ``reach`` and ``forced`` broadcast to the scores: what is out of reach is never chosen, what is
    forced and within reach before all else. ``count`` int64 ``[B, H, R]`` takes fewer than ``width``.
    Equal scores go to the lower column; -inf is never chosen, NaN only when nothing else is left.
    """
    if score.is_cuda:
        run = torch.ops.flexsparse.top_k if torch.compiler.is_compiling() else filled
        chosen: Tensor = run(score, width, reach, forced, count)
        return chosen
    return by_sort(score, width, reach, forced, count)


def by_sort(
    score: Tensor, width: int, reach: Tensor | None, forced: Tensor | None, count: Tensor | None
) -> Tensor:
    """The specification of the kernel."""
    columns = score.shape[-1]
    # torch.topk breaks ties as it likes; a stable sort keeps the lower index first.
    value, order = ranks(score, reach, forced).sort(dim=-1, descending=True, stable=True)
    taken = value[..., :width] > -torch.inf
    if count is not None:
        taken &= torch.arange(taken.shape[-1], device=score.device) < count[..., None]
    chosen = torch.where(taken, order[..., :width], columns).to(torch.int32).sort(dim=-1).values
    chosen = torch.where(chosen < columns, chosen, -1)
    return torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1).contiguous()


def ranks(score: Tensor, reach: Tensor | None, forced: Tensor | None) -> Tensor:
    """What columns are ordered by: +inf where forced, -inf where never; NaN below every number."""
    range_ = torch.finfo(score.dtype)
    rank = score.nan_to_num(nan=range_.min, posinf=range_.max, neginf=-torch.inf)
    if forced is not None:
        rank = rank.masked_fill(forced, torch.inf)
    return rank if reach is None else rank.masked_fill(~reach, -torch.inf)


def filled(
    score: Tensor, width: int, reach: Tensor | None, forced: Tensor | None, count: Tensor | None
) -> Tensor:
    """By the kernel, where a row fits into its registers and is exact in fp32."""
    from flexsparse.kernels import triton_top_k

    if score.shape[-1] > triton_top_k.MOST or score.dtype == torch.float64:
        return by_sort(score, width, reach, forced, count)
    return triton_top_k.launch(score, width, reach, forced, count)


_operator = custom_op("flexsparse::top_k", filled, mutates_args=())


@_operator.register_fake
def _(
    score: Tensor, width: int, reach: Tensor | None, forced: Tensor | None, count: Tensor | None
) -> Tensor:
    return score.new_empty((*score.shape[:-1], width), dtype=torch.int32)
