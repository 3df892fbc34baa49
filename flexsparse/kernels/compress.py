"""A map of tiles as the lists that kernels walk, by row and by column."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


def compress(present: Tensor, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """bool ``[..., R, C]`` -> counts ``[..., R]`` and rising indices ``[..., R, capacity]``, int32.

    Slots past the count hold 0: a kernel may load the first slot of an empty row. What does not fit
    into ``capacity`` (by default all columns) is left out of indices and counts.
    """
    capacity = present.shape[-1] if capacity is None else capacity
    if present.is_cuda:
        run = torch.ops.flexsparse.compress if torch.compiler.is_compiling() else filled
        counts, indices = run(present, capacity)
        return counts, indices
    return by_sort(present, capacity)


def by_sort(present: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The specification of the kernel."""
    counts = present.sum(-1, dtype=torch.int32).clamp(max=capacity)
    order = torch.argsort((~present).to(torch.int8), dim=-1, stable=True)[..., :capacity]
    order = torch.nn.functional.pad(order, (0, capacity - order.shape[-1]))
    used = torch.arange(capacity, device=present.device) < counts[..., None]
    return counts, torch.where(used, order, 0).to(torch.int32).contiguous()


def filled(present: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """By the kernel."""
    from flexsparse.kernels.triton_compress import launch

    return launch(present, capacity)


_operator = custom_op("flexsparse::compress", filled, mutates_args=())


@_operator.register_fake
def _(present: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    rows = present.shape[:-1]
    counts = present.new_empty(rows, dtype=torch.int32)
    return counts, present.new_empty((*rows, capacity), dtype=torch.int32)


def expand(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """The map ``[..., R, columns]`` that lists stand for; the inverse of `compress`."""
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # Unused slots write to a column of their own, which is then cut off.
    slot = torch.where(used, indices, columns).to(torch.int64)
    present = torch.zeros(
        (*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device
    )
    return present.scatter_(-1, slot, True)[..., :columns]
