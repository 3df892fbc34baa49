"""What blocks of keys hold of attention over windows of keys: its softmax mass, added up or at its peak.

Window i holds the keys ``i * stride … i * stride + length - 1``; a query at position p sees it once it is
complete, ``i * stride + length - 1 <= p``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.kernels.parts import rows_at_once
from flexsparse.shapes import ceil_div


class Around(NamedTuple):
    """Which windows speak for a block: for block j the ``width`` from ``j * step + start`` on.

    ``rise`` is the highest weight: by ``"sum"`` they count 1, 2, … ``rise`` …, 2, 1.
    """

    length: int
    stride: int
    step: int
    start: int
    width: int
    rise: int


def block_mass(
    q: Tensor,
    keys: Tensor,
    position: Tensor,
    around: Around,
    how: Literal["sum", "max"],
    blocks: int,
    q_block: int,
    share: int,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """``q [B, Hq, Q, D]``, one key a window ``[B, Hkv, N, D]`` -> ``[B, Hq / share, R, blocks]``, fp32 or of fp64 fp64.

    Each query's softmax over the windows that it sees is added over the ``q_block`` queries of a row and
    over ``share`` neighbouring heads (one, a part of those of a KV head, or those of several); a block
    has the weighted sum or the highest of the windows around it. ``position [B or 1, Q]`` int64 rises along
    the queries of a row. A query that sees no whole window gives none.

    ``lse [B, Hq, Q]`` of these softmaxes, natural log and -inf where no window is seen, spares the pass
    that finds it.
    """
    given = (q, keys, position, list(around), how, blocks, q_block, share, scale, lse)
    if q.is_cuda:
        run = torch.ops.flexsparse.block_mass if torch.compiler.is_compiling() else filled
        mass: Tensor = run(*given)
        return mass
    return by_softmax(*given)


def by_softmax(
    q: Tensor, keys: Tensor, position: Tensor, around: list[int], how: str, blocks: int, q_block: int,
    share: int, scale: float, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of the kernel: a few rows of queries at once."""
    of = Around(*around)
    batch, heads, length, _ = q.shape
    kv_heads, count = keys.shape[1:3]
    kind = _kind(q, keys)
    keys = keys.to(kind).mT[:, :, None]
    end = torch.arange(count, device=q.device) * of.stride + of.length - 1
    weights = _weights(of, q.device).to(kind)
    missing = (blocks - 1) * of.step + of.width + of.start - count
    weights_a_row = batch * heads * max(q_block * count, of.width * blocks // share)
    step = rows_at_once(q.device.type, weights_a_row) * q_block
    parts = []
    for start in range(0, length, step):
        here = slice(start, start + step)
        scores = q[:, :, here].to(kind).unflatten(1, (kv_heads, -1)) @ keys * scale
        scores = scores.masked_fill(end > position[:, None, None, here, None], -torch.inf)
        if lse is None:
            mass = scores.softmax(-1).nan_to_num(0.0)
        else:
            base = torch.where(lse == -torch.inf, 0, lse)[:, :, here, None].to(kind)
            mass = (scores - base.unflatten(1, (kv_heads, -1))).exp()
        mass = mass.flatten(1, 2).unflatten(1, (-1, share)).sum(2)
        mass = torch.nn.functional.pad(mass, (0, 0, 0, -mass.shape[2] % q_block))
        mass = mass.unflatten(2, (-1, q_block)).sum(3)
        near = torch.nn.functional.pad(mass, (-of.start, missing)).unfold(-1, of.width, of.step)
        parts.append(near @ weights if how == "sum" else near.amax(-1))
    return torch.cat(parts, 2)


def filled(
    q: Tensor, keys: Tensor, position: Tensor, around: list[int], how: str, blocks: int, q_block: int,
    share: int, scale: float, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """By the kernel, where it is exact in fp32 and a block's windows fit a step."""
    from flexsparse.kernels import triton_block_mass

    group = q.shape[1] // keys.shape[1]
    if not triton_block_mass.suits(q, keys, around) or (share > group and how == "max"):
        return by_softmax(q, keys, position, around, how, blocks, q_block, share, scale, lse)
    mass = triton_block_mass.launch(
        q, keys, position, around, how, blocks, q_block, min(share, group), scale, lse
    )
    return mass.unflatten(1, (-1, share // group)).sum(2) if share > group else mass


_operator = custom_op("flexsparse::block_mass", filled, mutates_args=())


@_operator.register_fake
def _(
    q: Tensor, keys: Tensor, position: Tensor, around: list[int], how: str, blocks: int, q_block: int,
    share: int, scale: float, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    shape = (q.shape[0], q.shape[1] // share, ceil_div(q.shape[2], q_block), blocks)
    return q.new_empty(shape, dtype=_kind(q, keys))


def _kind(q: Tensor, keys: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(q.dtype, keys.dtype), torch.float32)


def _weights(around: Around, device: torch.device) -> Tensor:
    place = torch.arange(around.width, device=device)
    return torch.minimum(place + 1, around.width - place).clamp(max=around.rise)
