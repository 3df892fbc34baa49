"""Whether what a plan is given fits what it was made for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsparse.arguments import check_qkv, check_selection
from flexsparse.device import autocast_dtype, has_tangent, tangents_there
from flexsparse.errors import ArgumentError, LayoutError, ShapeError
from flexsparse.layout import Layout
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector
from flexsparse.telling import ANEW

if TYPE_CHECKING:
    from flexsparse.plan import Plan


def check_select(plan: Plan, select: Selection | None) -> None:
    """Refuses a selection of another kind than this plan was made for."""
    if isinstance(select, Selector):
        raise ArgumentError(
            f"plan.layout needs a Selection, got a Selector, which chooses for a q and k: {ANEW}"
        )
    member = plan.program.member
    if (select is None) != (member is None):
        if member is not None:
            raise LayoutError(
                "this plan was made with a selection and is asked for a layout without one: give the next, "
                f"plan.layout(selection), by a selector {ANEW}, or make a plan for calls without one"
            )
        raise LayoutError(
            "this plan was made without a selection, and is asked with one: make a plan for calls "
            "with one"
        )
    if select is None or member is None:
        return
    check_selection(select, plan.grid, plan.shape[:2])
    if not plan.takes(select):
        raise LayoutError(
            f"this plan was made for selections with batch {member.batch}, heads "
            f"{member.heads} and blocks ({member.q_block}, {member.kv_block}), got batch "
            f"{select.batch}, heads {select.heads} and blocks "
            f"({select.q_block}, {select.kv_block}): make a plan for it"
        )
    if select.device != plan.device:
        raise ShapeError(
            f"select is on {select.device} but the plan on {plan.device}: move it "
            "with select.to(device)"
        )


def check_own(plan: Plan, layout: Layout, name: str) -> None:
    """Refuses what is no layout that this plan may write into, or cut."""
    if torch.compiler.is_compiling():
        raise LayoutError(
            "a layout is not changed in place inside torch.compile: do so outside, or in a graph"
        )
    if not isinstance(layout, Layout):
        raise ArgumentError(f"{name} must be a Layout, got {type(layout).__name__}")
    if layout.program is not plan.program or layout.kv_indices.device != plan.device:
        raise LayoutError(
            f"{layout!r} was not made by this plan ({plan.grid}, {plan.address}): make it with "
            "plan.layout"
        )


def as_made(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v are plainly such as the plan was made for, so that nothing is to be judged."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        return False
    if autocast_dtype(plan.device) is not None or tangents_there():
        return False
    for x, shape in zip((q, k, v), _known(plan.shape, *_lengths(plan)), strict=True):
        plain = isinstance(x, Tensor) and x.shape == shape and x.dtype is plan.dtype
        if not plain or x.device != plan.device or x.layout is not torch.strided or x.is_neg():
            return False
    return True


def check_tensors(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses q, k and v of other shapes, dtype or device."""
    for name, x, shape in zip("qkv", (q, k, v), _shapes(plan.shape, *_lengths(plan)), strict=True):
        if tuple(x.shape) != shape:
            raise ShapeError(
                f"this plan was made for {name} {list(shape)}, got {list(x.shape)}: make a plan "
                "for it"
            )
    if q.dtype != plan.dtype or q.device != plan.device:
        cast = ""
        if q.dtype is autocast_dtype(q.device):
            cast = ", to which torch.autocast casts here"
        raise ShapeError(
            f"this plan was made for {plan.dtype} on {plan.device}, got {q.dtype} on {q.device}{cast}: "
            "make a plan for it"
        )


def _lengths(plan: Plan) -> tuple[int, int, int]:
    return plan.grid.batch, plan.grid.q_len, plan.grid.kv_len


def _shapes(
    shape: tuple[int, int, int, int], batch: int, q_len: int, kv_len: int
) -> tuple[tuple[int, ...], ...]:
    """Of q, k and v."""
    heads, kv_heads, head_dim, v_head_dim = shape
    return (
        (batch, heads, q_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, v_head_dim),
    )


# Not for compiled code, which warns of what is kept.
_known = lru_cache(maxsize=256)(_shapes)


def checked_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, judged, and in the precision that autocast wants."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack():
        raise ArgumentError(
            "attention does not run under torch.func transforms (grad, vmap, jvp): take gradients "
            "with torch.autograd, and let the batch axis of q, k and v stand for vmap"
        )
    given = (q, k, v)
    if any(map(has_tangent, given)):
        raise ArgumentError(
            "attention has no forward-mode derivative, and q, k or v carries a tangent: take gradients "
            "with torch.autograd's backward"
        )
    floats = all(isinstance(x, Tensor) and x.is_floating_point() for x in given)
    if floats and (dtype := autocast_dtype(q.device)) is not None:
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in given)
    check_qkv(q, k, v)
    # An imaginary part of a conjugate is a view whose memory holds the opposite: kernels read memory.
    return q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
