"""Tiles that ask their pairs for single keys, by an own kernel where it knows all that is asked.

What FlexAttention generates loads a word of membership for every pair, forward and twice backward; the own
kernel loads one for eight pairs. It knows no scores, and no rule but the causal one: whatever else is asked
goes through FlexAttention. It stands behind custom operators, so that compiled user code goes around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.address import FoldedHeads, Identity
from flexsparse.backends import Call, Work
from flexsparse.backends.dense import is_causal
from flexsparse.backends.once import refuse_twice
from flexsparse.program import MaskProgram
from flexsparse.shapes import next_power_of_two

if TYPE_CHECKING:
    from flexsparse.kernels.triton_member import Words


# Rows and keys of which all that a program of the kernel multiplies at once are a part.
_PIECE = 64
# How heads are laid that do not stand beside each other.
_ROWS_OF_THEIR_OWN = (Identity, FoldedHeads)


def suits(work: Work) -> bool:
    """Whether the own kernel can do this work."""
    q, k, v, layout, score = work[:5]
    if not q.is_cuda or q.dtype.itemsize != 2 or score is not None or not _asks(layout.program):
        return False
    own_rows = type(layout.program.address) in _ROWS_OF_THEIR_OWN
    dense = all(x.stride(-1) == 1 for x in (q, k, v))
    columns = layout.columns is not None or not work.grads
    dims = (q.shape[-1], v.shape[-1])
    return own_rows and dense and columns and _fits(layout.block_size, dims)


def serves(call: Call, tile: tuple[int, int]) -> bool:
    """The same of a call over such tiles, where heads have rows of their own, before there is a layout."""
    if call.device.type != "cuda" or call.dtype.itemsize != 2 or call.scored:
        return False
    return _asks(call.program) and _fits(tile, (call.head_dim, call.v_head_dim))


def _fits(tile: tuple[int, int], dims: tuple[int, int]) -> bool:
    """Whether tiles are whole pieces of the kernel, and head dims powers of two of up to 128."""
    whole = not tile[0] % _PIECE and not tile[1] % _PIECE
    return whole and all(16 <= d <= 128 and d == next_power_of_two(d) for d in dims)


def _asks(program: MaskProgram) -> bool:
    """Whether a program is membership of single keys, causal or not, and nothing else."""
    member, rule = program.member, program.rule
    if member is None or program.reach is not None or member.one_row:
        return False
    tokens = member.q_block == member.kv_block == 1
    return tokens and (rule is None or (is_causal(rule) and program.offset == "none"))


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    layout, program = work.layout, work.layout.program
    assert program.member is not None
    address = program.address
    facts = [
        address.fold, address.heads // program.member.heads, int(program.rule is not None),
        *layout.block_size,
    ]  # fmt: skip
    # Without gradients the lists by column are not read.
    lists = layout.lists if work.grads else layout.lists[:4]
    out, lse = torch.ops.flexsparse.member_forward(
        work.q, work.k, work.v, layout.tables[program.words_at], lists, facts, work.scale
    )
    return out, lse if work.lse else None


@custom_op("flexsparse::member_forward", mutates_args=())
def member_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    lists: list[Tensor],
    facts: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out ``[B, H, Q, Dv]`` in q's dtype, lse ``[B, H, Q]`` in fp32."""
    from flexsparse.kernels.triton_member import forward

    words, tile = _words(bits, facts)
    return forward(q, k, v, words, lists, tile, scale)


@member_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    lists: list[Tensor],
    facts: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("flexsparse::member_backward", mutates_args=())
def member_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, bits: Tensor, lists: list[Tensor], facts: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    from flexsparse.kernels.triton_member_gradients import backward

    words, tile = _words(bits, facts)
    do = grad_out.to(out.dtype).contiguous()
    d_lse = None if grad_lse is None else grad_lse.contiguous()
    return backward(q, k, v, out, do, lse, d_lse, words, lists, tile, scale)


@member_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, bits: Tensor, lists: list[Tensor], facts: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _words(bits: Tensor, facts: list[int]) -> tuple[Words, tuple[int, int]]:
    """Membership as the kernel takes it, and the sizes of a tile."""
    from flexsparse.kernels.triton_member import Words

    fold, sharing, causal, q_tile, kv_tile = facts
    return Words(bits, fold, sharing, bool(causal)), (q_tile, kv_tile)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bits, lists, ctx.facts, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, bits, *lists)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, bits, *lists = ctx.saved_tensors
    unused = (None, [None] * len(lists), None, None)
    if grad_out is None and grad_lse is None:
        return None, None, None, *unused
    flow = torch.zeros_like(out) if grad_out is None else grad_out
    found = torch.ops.flexsparse.member_backward(
        flow, grad_lse, q, k, v, out, lse, bits, lists, ctx.facts, ctx.scale
    )
    return *found, *unused


member_forward.register_autograd(_differentiate, setup_context=_keep)
member_backward.register_autograd(refuse_twice)
