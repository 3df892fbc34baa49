"""Rows of tensors taken for the pieces of lists, and what pieces find put together; each with its gradient.

``place [B or 1, H or 1, M]`` says where each row is taken from, ``owner`` and ``parts`` ``[B or 1, H or 1, E]``
whose pieces stand in which of E slots, as `cut_lists` gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("flexsparse::take", mutates_args=())
def take(x: Tensor, place: Tensor, owner: Tensor, parts: Tensor, ahead: bool) -> Tensor:
    """``x [B, H, N, D]`` at ``place [B or 1, H or 1, M]``; with ``ahead`` followed by x itself.

    Its backward adds what the pieces of a list give, in their order.
    """
    if _fuses(x):
        from flexsparse.kernels import triton_pieces

        return triton_pieces.take(x, place, ahead)
    at = place.to(torch.int64).expand(*x.shape[:2], -1)[..., None].expand(-1, -1, -1, x.shape[-1])
    found = x.gather(2, at)
    return torch.cat([found, x], 2) if ahead else found


@take.register_fake
def _(x: Tensor, place: Tensor, owner: Tensor, parts: Tensor, ahead: bool) -> Tensor:
    more = x.shape[2] if ahead else 0
    return x.new_empty((*x.shape[:2], place.shape[-1] + more, x.shape[-1]))


@custom_op("flexsparse::untake", mutates_args=())
def untake(grad: Tensor, owner: Tensor, parts: Tensor, length: int, ahead: bool) -> Tensor:
    """``[B, H, length, D]``: ``grad`` as of what `take` gives, added up where it was taken."""
    taken = grad.shape[2] - (length if ahead else 0)
    if ahead:
        total = grad[:, :, taken:].clone(memory_format=torch.contiguous_format)
    else:
        total = grad.new_zeros((*grad.shape[:2], length, grad.shape[-1]))
    size = taken // owner.shape[-1]
    if _fuses(grad):
        from flexsparse.kernels import triton_pieces

        triton_pieces.add(grad, owner, parts, total, size)
        return total
    for at, slots, rows in _cut(owner, parts, total, size):
        pieces = grad[at][slots].unflatten(0, (-1, size))[:, : rows.stop - rows.start]
        total[at][rows] += pieces.to(torch.promote_types(grad.dtype, torch.float32)).sum(0)
    return total


@untake.register_fake
def _(grad: Tensor, owner: Tensor, parts: Tensor, length: int, ahead: bool) -> Tensor:
    return grad.new_empty((*grad.shape[:2], length, grad.shape[-1]))


def _keep_taken(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, owner, parts, ctx.ahead = inputs
    ctx.length = x.shape[2]
    ctx.save_for_backward(owner, parts)


def _untaken(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    owner, parts = ctx.saved_tensors
    return untake(grad, owner, parts, ctx.length, ctx.ahead), None, None, None, None


take.register_autograd(_untaken, setup_context=_keep_taken)


def join_into(
    out: Tensor, lse: Tensor, pieces: Tensor, of_pieces: Tensor, owner: Tensor, parts: Tensor
) -> Tensor:
    """Writes the rows of cut lists into ``out [B, H, Q, D]`` and ``lse [B, H, Q]``, from ``pieces
    [B, H, E * size, D]`` and their lse; gives the weight of each, ``[B, H, E * size]``."""
    weight = torch.zeros_like(of_pieces, memory_format=torch.contiguous_format)
    if _fuses(out):
        from flexsparse.kernels import triton_pieces

        triton_pieces.join(out, lse, pieces, of_pieces, owner, parts, weight)
        return weight
    size = pieces.shape[2] // owner.shape[-1]
    for at, slots, rows in _cut(owner, parts, out, size):
        here = rows.stop - rows.start
        own = of_pieces[at][slots].unflatten(0, (-1, size))[:, :here]
        peak = own.amax(0)
        base = torch.where(peak == -torch.inf, 0, peak)
        mass = (own - base).exp().sum(0)
        lse[at][rows] = torch.where(mass == 0, -torch.inf, base + mass.log())
        share = (own - base).exp() / torch.where(mass == 0, 1, mass)
        found = pieces[at][slots].unflatten(0, (-1, size))[:, :here]
        out[at][rows] = (share[..., None] * found.to(share.dtype)).sum(0).to(out.dtype)
        weight[at][slots].unflatten(0, (-1, size))[:, :here] = share
    return weight


class _Beside(torch.autograd.Function):
    """x, and x at some places; the gradient of these is added to that of x in its own memory.

    The x it gives is for one kernel alone, whose gradient nobody else holds.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, place: Tensor, owner: Tensor, parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(owner, parts)
        return x.view_as(x), take(x, place, owner, parts, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from flexsparse.kernels import triton_pieces

        owner, parts = ctx.saved_tensors
        total, found = grads
        if total.stride(-1) != 1:
            total = total.contiguous()
        triton_pieces.add(found, owner, parts, total, found.shape[2] // owner.shape[-1])
        return total, None, None, None


class _Joined(torch.autograd.Function):
    """`join_into` with gradients, in the memory of ``out`` and ``lse``: the kernel that gave them has
    no tiles in the rows that are written, so that its own gradient heeds none of these."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, pieces: Tensor, of_pieces: Tensor, place: Tensor,
        owner: Tensor, parts: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight = join_into(out, lse, pieces, of_pieces, owner, parts)
        out, lse = out.view_as(out), lse.view_as(lse)
        ctx.save_for_backward(out, pieces, weight, place)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        own = unjoin_pieces(grad_out, grad_lse, *ctx.saved_tensors)
        return grad_out, grad_lse, *own, None, None, None


def beside(x: Tensor, place: Tensor, owner: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """x for one kernel, and x at some places for another."""
    if torch.compiler.is_compiling() or not _fuses(x):
        return x, take(x, place, owner, parts, False)
    if not _learns(x):
        from flexsparse.kernels import triton_pieces

        # Nobody asks for what stands around an operator, and the host pays for it.
        return x, triton_pieces.take(x, place, False)
    kept: Any = _Beside
    found: tuple[Tensor, Tensor] = kept.apply(x, place, owner, parts)
    return found


def join(
    out: Tensor, lse: Tensor, pieces: Tensor, of_pieces: Tensor, place: Tensor, owner: Tensor,
    parts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out`` and ``lse``, which nobody else holds, with the rows of cut lists; differentiable."""
    given = (out, lse, pieces, of_pieces, place, owner, parts)
    if torch.compiler.is_compiling() or not _fuses(out):
        out, lse, _ = join_pieces(*given)
        return out, lse
    if not _learns(out, lse, pieces, of_pieces):
        from flexsparse.kernels import triton_pieces

        triton_pieces.join(out, lse, pieces, of_pieces, owner, parts, None)
        return out, lse
    kept: Any = _Joined
    found: tuple[Tensor, Tensor] = kept.apply(*given)
    return found


def _fuses(x: Tensor) -> bool:
    """Whether a kernel does it: what stands beside it is its specification, and exact in fp64."""
    return x.is_cuda and x.dtype != torch.float64


def _learns(*given: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def _cut(
    owner: Tensor, parts: Tensor, x: Tensor, size: int
) -> Iterator[tuple[tuple[int, int], slice, slice]]:
    """Batch and head, rows of all pieces and rows of ``x [B, H, N, …]`` of each list that is cut."""
    for b, h in product(range(x.shape[0]), range(x.shape[1])):
        at = b % owner.shape[0], h % owner.shape[1]
        for slot in parts[at].nonzero()[:, 0].tolist():
            number, first = int(parts[at][slot]), int(owner[at][slot]) * size
            last = min(first + size, x.shape[2])
            yield (b, h), slice(slot * size, (slot + number) * size), slice(first, last)


@custom_op("flexsparse::join_pieces", mutates_args=())
def join_pieces(
    out: Tensor, lse: Tensor, pieces: Tensor, of_pieces: Tensor, place: Tensor, owner: Tensor,
    parts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`join_into` copies of ``out`` and ``lse``, which are given with the weight."""
    out, lse = out.clone(memory_format=torch.contiguous_format), lse.clone()
    return out, lse, join_into(out, lse, pieces, of_pieces, owner, parts)


@join_pieces.register_fake
def _(
    out: Tensor, lse: Tensor, pieces: Tensor, of_pieces: Tensor, place: Tensor, owner: Tensor,
    parts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    made = torch.empty_like(out, memory_format=torch.contiguous_format)
    weight = torch.empty_like(of_pieces, memory_format=torch.contiguous_format)
    return made, torch.empty_like(lse), weight


@custom_op("flexsparse::unjoin_pieces", mutates_args=())
def unjoin_pieces(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, pieces: Tensor, weight: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``pieces`` and of their lse."""
    if _fuses(out):
        from flexsparse.kernels import triton_pieces

        return triton_pieces.unjoin(grad_out, grad_lse, out, pieces, weight, place)
    at = place.to(torch.int64).expand(*out.shape[:2], -1)
    wide = at[..., None].expand(-1, -1, -1, out.shape[-1])
    do, whole = (x.gather(2, wide).to(weight.dtype) for x in (grad_out, out))
    moved = (do * (pieces.to(weight.dtype) - whole)).sum(-1) + grad_lse.gather(2, at)
    return (do * weight[..., None]).to(pieces.dtype), moved * weight


@unjoin_pieces.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, pieces: Tensor, weight: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    return pieces.new_empty(pieces.shape), weight.new_empty(weight.shape)


def _keep_joined(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, pieces, _, place, _, _ = inputs
    out, _, weight = output
    ctx.save_for_backward(out, pieces, weight, place)
    ctx.mark_non_differentiable(weight)
    ctx.set_materialize_grads(True)


def _unjoined(ctx: Any, grad_out: Tensor, grad_lse: Tensor, _: Tensor) -> tuple[Any, ...]:
    # The rows that were cut have no tiles of their own, so that no kernel heeds their gradient.
    grads = unjoin_pieces(grad_out, grad_lse, *ctx.saved_tensors)
    return grad_out, grad_lse, *grads, None, None, None


join_pieces.register_autograd(_unjoined, setup_context=_keep_joined)
