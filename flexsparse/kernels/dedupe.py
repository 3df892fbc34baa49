"""Sets from lists: sorted, unique candidates, unused slots last."""

from __future__ import annotations

import torch
from torch import Tensor


def sorted_unique(indices: Tensor, valid: Tensor) -> Tensor:
    """``[..., K]`` any integers -> int32, each valid value once, rising, then -1."""
    big = torch.iinfo(torch.int32).max
    values = torch.where(valid, indices, big).to(torch.int32)
    values = values.sort(dim=-1).values
    repeated = torch.zeros_like(values, dtype=torch.bool)
    repeated[..., 1:] = values[..., 1:] == values[..., :-1]
    values = torch.where(repeated, big, values).sort(dim=-1).values
    return torch.where(values == big, -1, values)
