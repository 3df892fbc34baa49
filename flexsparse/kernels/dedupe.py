"""Sets from lists: sorted, unique candidates, unused slots last."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


def sorted_unique(indices: Tensor, limit: int, width: int) -> Tensor:
    """``[..., K]`` any integers -> int32 ``[..., width]``: each in [0, limit) once, rising, then -1.

    ``width`` is at most K, and holds as many as there can be: ``min(K, limit)`` or more, or what is
    known of them.
    """
    if indices.is_cuda:
        run = torch.ops.flexsparse.sorted_unique if torch.compiler.is_compiling() else filled
        unique: Tensor = run(indices, limit, width)
        return unique
    return by_sorts(indices, limit, width)


def by_sorts(indices: Tensor, limit: int, width: int) -> Tensor:
    """The specification of the kernel."""
    big = torch.iinfo(torch.int32).max
    values = torch.where((indices >= 0) & (indices < limit), indices, big).to(torch.int32)
    values = values.sort(dim=-1).values
    repeated = torch.zeros_like(values, dtype=torch.bool)
    repeated[..., 1:] = values[..., 1:] == values[..., :-1]
    values = torch.where(repeated, big, values).sort(dim=-1).values[..., :width]
    return torch.where(values == big, -1, values).contiguous()


def filled(indices: Tensor, limit: int, width: int) -> Tensor:
    """By the kernel, where a row fits into its registers."""
    from flexsparse.kernels import triton_dedupe

    if indices.shape[-1] > triton_dedupe.MOST:
        return by_sorts(indices, limit, width)
    return triton_dedupe.launch(indices, limit, width)


_operator = custom_op("flexsparse::sorted_unique", filled, mutates_args=())


@_operator.register_fake
def _(indices: Tensor, limit: int, width: int) -> Tensor:
    return indices.new_empty((*indices.shape[:-1], width), dtype=torch.int32)
