"""What key summaries are worth to rows of queries: the highest product of any query and head of a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.kernels.parts import rows_at_once
from flexsparse.shapes import ceil_div


def row_peaks(
    q: Tensor, low: Tensor, high: Tensor | None, q_block: int, share: int, scale: float
) -> Tensor:
    """``q [B, Hq, Q, D]``, summaries ``[B, Hkv, C, D]`` -> ``[B, Hq / share, R, C]``, fp32 or of fp64 fp64.

    The highest of ``q . low``, or with ``high`` of the sum over channels of the larger of ``q * low`` and
    ``q * high``, among the ``q_block`` queries of a row and ``share`` neighbouring heads, times ``scale``.
    ``share`` heads are one, a part of those of a KV head, or those of several. Products are added in at least fp32.
    """
    if q.is_cuda:
        run = torch.ops.flexsparse.row_peaks if torch.compiler.is_compiling() else filled
        worth: Tensor = run(q, low, high, q_block, share, scale)
        return worth
    return by_products(q, low, high, q_block, share, scale)


def by_products(
    q: Tensor, low: Tensor, high: Tensor | None, q_block: int, share: int, scale: float
) -> Tensor:
    """The specification of the kernel: a few rows of queries at once."""
    batch, heads, length, _ = q.shape
    kv_heads, columns = low.shape[1:3]
    kind = torch.promote_types(torch.promote_types(q.dtype, low.dtype), torch.float32)
    low = low.to(kind).mT[:, :, None]
    high = None if high is None else high.to(kind).mT[:, :, None]
    step = rows_at_once(q.device.type, batch * heads * q_block * columns) * q_block
    parts = []
    for start in range(0, length, step):
        each = q[:, :, start : start + step].to(kind).unflatten(1, (kv_heads, -1))
        product = each @ low if high is None else each.clamp(min=0) @ high + each.clamp(max=0) @ low
        product = product.flatten(1, 2).unflatten(1, (-1, share)).amax(2)
        missing = -product.shape[2] % q_block
        product = torch.nn.functional.pad(product, (0, 0, 0, missing), value=-torch.inf)
        parts.append(product.unflatten(2, (-1, q_block)).amax(3))
    return torch.cat(parts, 2) * scale


def filled(
    q: Tensor, low: Tensor, high: Tensor | None, q_block: int, share: int, scale: float
) -> Tensor:
    """By the kernel, where it is exact in fp32 and a channel fits a step."""
    from flexsparse.kernels import triton_row_peaks

    group = q.shape[1] // low.shape[1]
    if triton_row_peaks.suits(q, low):
        peaks = triton_row_peaks.launch(q, low, high, q_block, min(share, group), scale)
        return peaks.unflatten(1, (-1, share // group)).amax(2) if share > group else peaks
    return by_products(q, low, high, q_block, share, scale)


_operator = custom_op("flexsparse::row_peaks", filled, mutates_args=())


@_operator.register_fake
def _(
    q: Tensor, low: Tensor, high: Tensor | None, q_block: int, share: int, scale: float
) -> Tensor:
    kind = torch.promote_types(torch.promote_types(q.dtype, low.dtype), torch.float32)
    shape = (q.shape[0], q.shape[1] // share, ceil_div(q.shape[2], q_block), low.shape[2])
    return q.new_empty(shape, dtype=kind)
