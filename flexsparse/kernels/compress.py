"""A map of tiles as the lists that kernels walk, by row and by column."""

from __future__ import annotations

import torch
from torch import Tensor


def compress(present: Tensor) -> tuple[Tensor, Tensor]:
    """bool ``[..., R, C]`` -> counts ``[..., R]`` and rising indices ``[..., R, C]``, both int32.

    Slots past the count hold 0: a kernel may load the first slot of an empty row.
    """
    counts = present.sum(-1, dtype=torch.int32)
    order = torch.argsort((~present).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    used = torch.arange(present.shape[-1], device=present.device) < counts[..., None]
    return counts, torch.where(used, order, 0).contiguous()


def expand(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """The map of ``columns`` that lists stand for; the inverse of `compress`."""
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # Unused slots write to a column of their own, which is then cut off.
    slot = torch.where(used, indices, columns).to(torch.int64)
    present = torch.zeros(
        (*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device
    )
    return present.scatter_(-1, slot, True)[..., :columns]
