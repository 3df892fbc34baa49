"""Sets from lists: sorted, unique candidates, unused slots last."""

from __future__ import annotations

import torch
from torch import Tensor


def sorted_unique(indices: Tensor, limit: int, width: int) -> Tensor:
    """``[..., K]`` any integers -> int32 ``[..., width]``: each in [0, limit) once, rising, then -1."""
    if indices.is_cuda:
        from flexsparse.kernels import triton_dedupe

        if indices.shape[-1] <= triton_dedupe.MOST:
            return triton_dedupe.launch(indices, limit, width)
    big = torch.iinfo(torch.int32).max
    values = torch.where((indices >= 0) & (indices < limit), indices, big).to(torch.int32)
    values = values.sort(dim=-1).values
    repeated = torch.zeros_like(values, dtype=torch.bool)
    repeated[..., 1:] = values[..., 1:] == values[..., :-1]
    values = torch.where(repeated, big, values).sort(dim=-1).values[..., :width]
    return torch.where(values == big, -1, values).contiguous()
