"""What `pieces` does with rows of tensors, as kernels: a program some rows of a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

_ROWS = 16


@triton.jit
def _take(
    x, place, found, taken, rows, dim, heads, list_batch, list_heads,
    stride_b, stride_h, stride_n,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.program_id(1).to(tl.int64)
    b, h = lane // heads, lane % heads
    of = (b % list_batch) * list_heads + h % list_heads
    d = tl.arange(0, DIM)
    from_place = tl.load(place + of * taken + row, mask=row < taken, other=0)
    source = tl.where(row < taken, from_place, row - taken)
    inside = (row < rows)[:, None] & (d < dim)[None, :]
    at = x + b * stride_b + h * stride_h + source.to(tl.int64)[:, None] * stride_n + d[None, :]
    value = tl.load(at, mask=inside, other=0.0)
    tl.store(found + (lane * rows + row[:, None]) * dim + d[None, :], value, mask=inside)


def take(x: Tensor, place: Tensor, ahead: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, dim = x.shape
    taken = place.shape[-1]
    rows = taken + (length if ahead else 0)
    found = x.new_empty((batch, heads, rows, dim))
    dispatch(
        _take, (ceil_div(rows, _ROWS), batch * heads),
        x, place, found, taken, rows, dim, heads, place.shape[0], place.shape[1],
        x.stride(0), x.stride(1), x.stride(2), ROWS=_ROWS, DIM=next_power_of_two(dim),
    )  # fmt: skip
    return found


@triton.jit
def _add(
    grad, owner, parts, total, grad_rows, length, dim, slots, size, heads, list_batch, list_heads,
    total_b, total_h, total_n,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    b, h = lane // heads, lane % heads
    of = ((b % list_batch) * list_heads + h % list_heads) * slots + slot
    number = tl.load(parts + of)
    if number > 0:
        t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        row = tl.load(owner + of) * size + t
        d = tl.arange(0, DIM)
        inside = ((t < size) & (row < length))[:, None] & (d < dim)[None, :]
        at = total + b * total_b + h * total_h + row.to(tl.int64)[:, None] * total_n + d[None, :]
        found = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        for j in range(number):
            piece = grad + (lane * grad_rows + (slot + j) * size + t[:, None]) * dim + d[None, :]
            found += tl.load(piece, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, found.to(total.dtype.element_ty), mask=inside)


def add(grad: Tensor, owner: Tensor, parts: Tensor, total: Tensor, size: int) -> None:
    """``total`` has rows of adjacent numbers."""
    grad = grad.contiguous()
    batch, heads, length, dim = total.shape
    dispatch(
        _add, (owner.shape[-1], batch * heads, ceil_div(size, _ROWS)),
        grad, owner, parts, total, grad.shape[2], length, dim, owner.shape[-1], size, heads,
        owner.shape[0], owner.shape[1], *total.stride()[:3], ROWS=_ROWS, DIM=next_power_of_two(dim),
    )  # fmt: skip


@triton.jit
def _join(
    out, lse, pieces, of_pieces, owner, parts, weight, length, dim, slots, size, heads, list_batch,
    list_heads, out_b, out_h, out_n, lse_b, lse_h, lse_n, piece_b, piece_h, piece_n, own_b, own_h, own_n,
    ROWS: tl.constexpr, DIM: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    b, h = lane // heads, lane % heads
    of = ((b % list_batch) * list_heads + h % list_heads) * slots + slot
    number = tl.load(parts + of)
    if number > 0:
        t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        row = tl.load(owner + of) * size + t
        d = tl.arange(0, DIM)
        here = (t < size) & (row < length)
        inside = here[:, None] & (d < dim)[None, :]
        own = of_pieces + b * own_b + h * own_h + (slot * size + t) * own_n
        after = size * own_n
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        for j in range(number):
            peak = tl.maximum(peak, tl.load(own + j * after, mask=here, other=float("-inf")))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.zeros([ROWS], tl.float32)
        for j in range(number):
            mass += tl.exp(tl.load(own + j * after, mask=here, other=float("-inf")) - base)
        divisor = tl.where(mass == 0.0, 1.0, mass)
        found = tl.zeros([ROWS, DIM], tl.float32)
        first = (slot * size + t).to(tl.int64)
        for j in range(number):
            share = (
                tl.exp(tl.load(own + j * after, mask=here, other=float("-inf")) - base) / divisor
            )
            at = first + j * size
            spot = pieces + b * piece_b + h * piece_h + at[:, None] * piece_n + d[None, :]
            found += share[:, None] * tl.load(spot, mask=inside, other=0.0).to(tl.float32)
            if WEIGHS:
                tl.store(weight + lane * slots * size + at, share, mask=here)
        spot = out + b * out_b + h * out_h + row.to(tl.int64)[:, None] * out_n + d[None, :]
        tl.store(spot, found.to(out.dtype.element_ty), mask=inside)
        whole = tl.where(mass == 0.0, float("-inf"), base + tl.log(divisor))
        tl.store(lse + b * lse_b + h * lse_h + row * lse_n, whole, mask=here)


def join(
    out: Tensor, lse: Tensor, pieces: Tensor, of_pieces: Tensor, owner: Tensor, parts: Tensor,
    weight: Tensor | None,
) -> None:  # fmt: skip
    """``out`` has rows of adjacent numbers; without ``weight`` nobody is told what each piece weighs."""
    size = pieces.shape[2] // owner.shape[-1]
    batch, heads, length, dim = out.shape
    pieces = pieces if pieces.stride(-1) == 1 else pieces.contiguous()
    dispatch(
        _join, (owner.shape[-1], batch * heads, ceil_div(size, _ROWS)),
        out, lse, pieces, of_pieces, owner, parts, lse if weight is None else weight,
        length, dim, owner.shape[-1], size, heads,
        owner.shape[0], owner.shape[1], *out.stride()[:3], *lse.stride(),
        *pieces.stride()[:3], *of_pieces.stride(),
        ROWS=_ROWS, DIM=next_power_of_two(dim), WEIGHS=weight is not None,
    )  # fmt: skip


@triton.jit
def _unjoin(
    grad_out, grad_lse, out, pieces, weight, place, grad_pieces, grad_of_pieces, rows, length, dim,
    heads, list_batch, list_heads, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.program_id(1).to(tl.int64)
    b, h = lane // heads, lane % heads
    d = tl.arange(0, DIM)
    here = row < rows
    inside = here[:, None] & (d < dim)[None, :]
    of = (b % list_batch) * list_heads + h % list_heads
    source = lane * length + tl.load(place + of * rows + row, mask=here, other=0)
    at = source[:, None] * dim + d[None, :]
    do = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
    whole = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    own = (lane * rows + row)[:, None] * dim + d[None, :]
    piece = tl.load(pieces + own, mask=inside, other=0.0).to(tl.float32)
    share = tl.load(weight + lane * rows + row, mask=here, other=0.0)
    moved = tl.sum(do * (piece - whole), 1) + tl.load(grad_lse + source, mask=here, other=0.0)
    tl.store(grad_pieces + own, (share[:, None] * do).to(grad_pieces.dtype.element_ty), mask=inside)
    tl.store(grad_of_pieces + lane * rows + row, share * moved, mask=here)


def unjoin(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, pieces: Tensor, weight: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = out.shape
    rows = weight.shape[-1]
    grads = pieces.new_empty(pieces.shape), torch.empty_like(weight)
    dispatch(
        _unjoin, (ceil_div(rows, _ROWS), batch * heads),
        grad_out.contiguous(), grad_lse.contiguous(), out, pieces.contiguous(), weight, place, *grads,
        rows, length, dim, heads, place.shape[0], place.shape[1],
        ROWS=_ROWS, DIM=next_power_of_two(dim),
    )  # fmt: skip
    return grads
