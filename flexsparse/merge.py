"""Partial results and the one place where softmaxes over parts of the keys are joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.shapes import axes


class Partial(NamedTuple):
    """Attention over some of the keys: ``out [B, Hq, Q, Dv]`` and ``lse [B, Hq, Q]``.

    lse is the natural logarithm of the sum of exponentials; -inf, with out 0, where nothing was
    seen.
    """

    out: Tensor
    lse: Tensor


def merge(parts: Iterable[Partial]) -> Partial:
    """Joins parts over disjoint keys into the attention over all of them; differentiable.

    >>> nothing = Partial(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), float("-inf")))
    >>> merge([nothing, nothing]).lse.item()
    -inf
    """
    parts = list(parts)
    if not parts:
        raise ArgumentError("merge needs at least one Partial, got an empty sequence")
    for i, part in enumerate(parts):
        if not isinstance(part, Partial):
            raise ArgumentError(f"merge needs Partials, got {type(part).__name__} at place {i}")
        if part.lse is None:
            raise ArgumentError(
                f"merge needs the lse of every part; place {i} has none: ask for it with return_lse=True"
            )
    for i, part in enumerate(parts):
        if part.out.device != parts[0].out.device:
            raise ShapeError(
                f"merge needs parts on one device: place {i} is on {part.out.device}, place 0 on "
                f"{parts[0].out.device}"
            )
    named = {f"out{i}": (p.out, "b h q d") for i, p in enumerate(parts)}
    named |= {f"lse{i}": (p.lse, "b h q") for i, p in enumerate(parts)}
    axes(**named)
    lse = torch.stack([p.lse for p in parts])
    peak = lse.amax(0)
    # Where nothing was seen at all the peak is -inf, and -inf - -inf would be NaN.
    base = torch.where(peak == -torch.inf, 0, peak).detach()
    weight = (lse - base).exp()
    total = weight.sum(0)
    share = weight / torch.where(total == 0, 1, total)
    joined = base + torch.where(total == 0, 1, total).log()
    out = torch.stack([p.out.to(share.dtype) for p in parts])
    return Partial(
        (share[..., None] * out).sum(0).to(parts[0].out.dtype),
        torch.where(total == 0, -torch.inf, joined),
    )


def with_sink(part: Partial, sink: Tensor) -> Partial:
    """Adds a learned logit per query head, ``[Hq]``, to the denominator.

    Source: the sinks of gpt-oss (OpenAI, 2025) and of Xiao et al., "StreamingLLM", 2023, 3.2.
    """
    logit = sink.to(part.lse.dtype)[None, :, None]
    # Where nothing was seen, the sink is all there is; -inf - -inf would be NaN there.
    empty = part.lse == -torch.inf
    lse = torch.where(empty, 0, part.lse)
    share = torch.where(empty, 0, torch.sigmoid(lse - logit))
    out = (part.out.to(share.dtype) * share[..., None]).to(part.out.dtype)
    return Partial(out, torch.where(empty, logit, torch.logaddexp(lse, logit)))
