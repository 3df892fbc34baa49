"""Tile by tile in plain torch: exact in every precision on every device, with its own backward.

The walk is a kernel's: each row of tiles visits the tiles of its list one by one, with an online
softmax; each column of tiles gathers the gradients of its keys from its own list. All rows take
their j-th step together. It stands behind custom operators, so that compiled user code goes around
it, and nothing in it is summed in an order that may change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.backends import Call, Work
from flexsparse.backends.once import refuse_twice
from flexsparse.backends.tile_gradients import Backward
from flexsparse.backends.walk import computing, steps, walk_of

name = "tiles"


def refuses(call: Call) -> str | None:
    """Nothing: every call can be run."""
    return None


def tile_for(tile: tuple[int, int], call: Call) -> tuple[int, int]:
    """Any."""
    return tile


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    layout = work.layout
    out, lse = torch.ops.flexsparse.tiles_forward(
        work.q,
        work.k,
        work.v,
        layout.lists,
        [t.detach() for t in layout.tables],
        list(work.score_tables),
        layout.program.key,
        work.score.key if work.score else "",
        list(layout.block_size),
        work.scale,
    )
    return out, lse if work.lse else None


@custom_op("flexsparse::tiles_forward", mutates_args=())
def tiles_forward(
    q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], mask_tables: list[Tensor],
    score_tables: list[Tensor], mask_key: str, score_key: str, block_size: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``[B, H, Q, Dv]`` in q's dtype, lse ``[B, H, Q]`` in fp32 (fp64 for fp64)."""
    walk = walk_of(q, k, v, mask_tables, mask_key, score_key, block_size, scale)
    batch, heads, q_len, _ = q.shape
    rows = walk.span.tiles[0]
    total = batch * heads * rows
    peak = walk.q.new_full((total, walk.span.q_tile), -torch.inf)
    mass = walk.q.new_zeros((total, walk.span.q_tile))
    out = walk.q.new_zeros((total, walk.span.q_tile, v.shape[-1]))
    area = walk.span.q_tile * walk.span.kv_tile
    for tiles in steps((lists[0], lists[2]), (lists[1], lists[3]), (batch, heads), area):
        scores, at, seen = walk.pairs(tiles)
        if walk.score is not None:
            scores = walk.rescored(scores, at, *score_tables)
        scores = scores.masked_fill(~seen, -torch.inf)
        old = peak[tiles.row]
        new = torch.maximum(old, scores.amax(-1))
        # A row that has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
        base = torch.where(new == -torch.inf, 0, new)
        weight = (scores - base[..., None]).exp()
        shrink = (old - base).exp()
        peak[tiles.row] = new
        mass[tiles.row] = mass[tiles.row] * shrink + weight.sum(-1)
        values = walk.keys(walk.v, tiles.row, tiles.column)
        out[tiles.row] = out[tiles.row] * shrink[..., None] + weight @ values
    out = out / torch.where(mass == 0, 1, mass)[..., None]
    lse = torch.where(mass == 0, -torch.inf, peak + torch.where(mass == 0, 1, mass).log())
    out = out.view(batch, heads, -1, v.shape[-1])[:, :, :q_len]
    return out.to(q.dtype, copy=True).contiguous(), lse.view(batch, heads, -1)[..., :q_len].clone()


@tiles_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], mask_tables: list[Tensor],
    score_tables: list[Tensor], mask_key: str, score_key: str, block_size: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3], dtype=computing(q)),
    )


@custom_op("flexsparse::tiles_backward", mutates_args=())
def tiles_backward(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    lists: list[Tensor], mask_tables: list[Tensor], score_tables: list[Tensor], mask_key: str,
    score_key: str, block_size: list[int], scale: float, learned: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """dq, dk, dv, and the gradients of the score's learned tensors."""
    walk = walk_of(q, k, v, mask_tables, mask_key, score_key, block_size, scale)
    dtype = walk.q.dtype
    do = grad_out.to(dtype)
    # d loss / d score = weight * (dP - delta), with the gradient through lse inside delta.
    delta = (do * out.to(dtype)).sum(-1) - grad_lse.to(dtype)
    base = torch.where(lse == -torch.inf, 0, lse)
    passed = Backward(walk, do, delta, base, score_tables, learned)
    dq, d_learned = passed.by_rows(lists)
    dk, dv = passed.by_columns(lists)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_learned


@tiles_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    lists: list[Tensor], mask_tables: list[Tensor], score_tables: list[Tensor], mask_key: str,
    score_key: str, block_size: list[int], scale: float, learned: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    d_learned = [torch.empty_like(t) for t, own in zip(score_tables, learned, strict=True) if own]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_learned


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lists, mask_tables, score_tables, *rest = inputs
    ctx.counts = (len(lists), len(mask_tables))
    ctx.rest = rest
    ctx.learned = [t.requires_grad for t in score_tables]
    ctx.save_for_backward(q, k, v, *output, *lists, *mask_tables, *score_tables)
    ctx.set_materialize_grads(True)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *tables = ctx.saved_tensors
    lists, masks = ctx.counts
    parts = tables[:lists], tables[lists : lists + masks], tables[lists + masks :]
    dq, dk, dv, d_learned = torch.ops.flexsparse.tiles_backward(
        grad_out, grad_lse, q, k, v, out, lse, *parts, *ctx.rest, ctx.learned
    )
    learned = iter(d_learned)
    d_tables = [next(learned) if own else None for own in ctx.learned]
    return dq, dk, dv, [None] * lists, [None] * masks, d_tables, None, None, None, None


tiles_forward.register_autograd(_differentiate, setup_context=_keep)
tiles_backward.register_autograd(refuse_twice)
