"""The candidates of each query gathered and attended to densely: for tokens too scattered for tiles.

No tile is visited: each query's list of keys is read key by key, and the query heads of a KV head share
what is read. On CUDA that is one kernel, in which no gathered key is ever written out; whole blocks are
read as such, and their gradients are summed over the queries that read them. With a score rule, in fp64
and on CPU it is plain torch, a few queries at a time. It stands behind custom operators, so that compiled
user code goes around it.

attention-gym's ``gather_attn`` is no part of it, but a peer of the bench: it takes one tensor for K and V,
one list for all heads, no rule, gives no gradient through lse, and on a cold cache was still tuning its
forward after 300 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.address import Identity
from flexsparse.backends import Call, Work
from flexsparse.backends.candidates import Candidates
from flexsparse.backends.gathered import BYTES_AT_ONCE, Gathered
from flexsparse.backends.once import refuse_twice
from flexsparse.backends.seen import seen_bits
from flexsparse.backends.walk import computing
from flexsparse.layout import Layout
from flexsparse.program import mask_of, score_of

name = "gather"

# A key must fit into the registers and shared memory of a program of the kernel, several at a time.
MOST_DIM = 256
# Keys of a block that are read as one, with head dims and query heads that fit beside them.
BLOCKS = frozenset({16, 32, 64, 128})
MOST_BLOCK_DIM = 128
MOST_READING_HEADS = 64


def refuses(call: Call) -> str | None:
    """Why there is nothing to gather, or None."""
    if not call.selected:
        return (
            "it gathers the candidates of a selection and this call has none (give one as select=)"
        )
    return None


def tile_for(tile: tuple[int, int], call: Call) -> tuple[int, int]:
    """Any: it visits none."""
    return tile


def fuses(call: Call) -> bool:
    """Whether on CUDA one kernel does it, without lists made anew for each query."""
    dims = (call.head_dim, call.v_head_dim)
    return call.program.reach is None and _fits(dims, call.dtype, call.scored)


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    layout = work.layout
    address, grid = layout.address, layout.grid
    of = candidates(layout)
    logical = Identity(address.heads, address.kv_heads)
    score = None if work.score is None else replace(work.score, address=logical)
    q = address.unpack(work.q, grid.batch)
    k, v = (x.reshape(grid.batch, address.kv_heads, *x.shape[-2:]) for x in (work.k, work.v))
    out, lse = torch.ops.flexsparse.gather_forward(
        q,
        k,
        v,
        of.indices,
        [t.detach() for t in of.tables],
        list(work.score_tables),
        of.rule.key,
        score.key if score else "",
        [of.q_block, of.kv_block, of.reach],
        work.scale,
    )
    return address.pack(out, "q"), address.pack(lse, "q") if work.lse else None


def candidates(layout: Layout) -> Candidates:
    """What the lists of a layout's queries are made from."""
    select, program, address, grid = layout.select, layout.program, layout.address, layout.grid
    assert select is not None and program.member is not None
    # Words of membership and who is empty are for kernels that visit tiles.
    skipped = 1 + (program.reach is not None)
    tables = [*layout.tables[: program.words_at], *layout.tables[program.words_at + skipped :]]
    return Candidates(
        select.indices, select.q_block, select.kv_block, program.reach or 0,
        program.of_rule_alone(), tables, grid.batch, address.heads, address.kv_heads, grid.kv_len,
    )  # fmt: skip


@custom_op("flexsparse::gather_forward", mutates_args=())
def gather_forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, mask_tables: list[Tensor],
    score_tables: list[Tensor], mask_key: str, score_key: str, blocks: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``[B, Hq, Q, Dv]`` in q's dtype, lse ``[B, Hq, Q]`` in fp32 (fp64 for fp64)."""
    listed = _candidates(q, k, indices, mask_tables, mask_key, blocks)
    if not _fused(q, v, score_key):
        score = score_of(score_key)
        return Gathered(q, k, v, listed, score, score_tables, scale, computing(q)).forward()
    from flexsparse.kernels import triton_gather, triton_gather_blocks

    q, k, v = (_dense_last(x) for x in (q, k, v))
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if _by_blocks(listed, q, v):
        seen, block = seen_bits(listed, k), listed.kv_block
        triton_gather_blocks.forward(q, k, v, listed.chosen(), seen, block, out, lse, scale)
        return out, lse
    for first, keys in _lists(listed, q):
        triton_gather.forward(q, k, v, keys, first, out, lse, scale)
    return out, lse


@gather_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, mask_tables: list[Tensor],
    score_tables: list[Tensor], mask_key: str, score_key: str, blocks: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3], dtype=computing(q)),
    )


@custom_op("flexsparse::gather_backward", mutates_args=())
def gather_backward(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor, mask_tables: list[Tensor], score_tables: list[Tensor], mask_key: str,
    score_key: str, blocks: list[int], scale: float, learned: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """dq, dk, dv, and the gradients of the score's learned tensors."""
    listed = _candidates(q, k, indices, mask_tables, mask_key, blocks)
    if not _fused(q, v, score_key):
        score = score_of(score_key)
        gathered = Gathered(q, k, v, listed, score, score_tables, scale, computing(q))
        return gathered.backward(grad_out, grad_lse, out, lse, learned)
    from flexsparse.kernels import triton_gather, triton_gather_blocks

    q, k, v = (_dense_last(x) for x in (q, k, v))
    do = grad_out.to(q.dtype).contiguous()
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    if _by_blocks(listed, q, v):
        triton_gather_blocks.backward(
            q, k, v, listed.chosen(), seen_bits(listed, k), listed.kv_block,
            out.contiguous(), do, lse.contiguous(), grad_lse.float().contiguous(), dq, dk, dv, scale,
        )  # fmt: skip
        return dq, dk.to(k.dtype), dv.to(v.dtype), []
    delta = (do.float() * out.float()).sum(-1) - grad_lse.float()
    for first, keys in _lists(listed, q):
        triton_gather.backward(q, k, v, keys, first, do, lse, delta, dq, dk, dv, scale)
    return dq, dk.to(k.dtype), dv.to(v.dtype), []


@gather_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor, mask_tables: list[Tensor], score_tables: list[Tensor], mask_key: str,
    score_key: str, blocks: list[int], scale: float, learned: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    d_learned = [torch.empty_like(t) for t, own in zip(score_tables, learned, strict=True) if own]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_learned


def _candidates(
    q: Tensor, k: Tensor, indices: Tensor, tables: list[Tensor], key: str, blocks: Sequence[int]
) -> Candidates:
    q_block, kv_block, reach = blocks
    (batch, heads), (kv_heads, kv_len) = q.shape[:2], k.shape[1:3]
    return Candidates(
        indices, q_block, kv_block, reach, mask_of(key), tables, batch, heads, kv_heads, kv_len
    )


def _fused(q: Tensor, v: Tensor, score_key: str) -> bool:
    """Whether the kernel does it."""
    return q.is_cuda and _fits((q.shape[-1], v.shape[-1]), q.dtype, bool(score_key))


def _fits(dims: tuple[int, int], dtype: torch.dtype, scored: bool) -> bool:
    """Whether the kernel can do it."""
    return max(dims) <= MOST_DIM and dtype != torch.float64 and not scored


def by_blocks(call: Call, q_block: int, kv_block: int, group: int) -> bool:
    """Whether queries read whole blocks, each of which a program can hold beside its readers;
    ``group`` query heads share a list."""
    dims = (call.head_dim, call.v_head_dim)
    return not call.program.reach and _whole(q_block, kv_block, dims, call.dtype, group)


def _by_blocks(of: Candidates, q: Tensor, v: Tensor) -> bool:
    dims, group = (q.shape[-1], v.shape[-1]), of.heads // of.lists
    return not of.reach and _whole(of.q_block, of.kv_block, dims, q.dtype, group)


def _whole(
    q_block: int, kv_block: int, dims: tuple[int, int], dtype: torch.dtype, group: int
) -> bool:
    fits = max(dims) <= MOST_BLOCK_DIM and group <= MOST_READING_HEADS and dtype.itemsize == 2
    return q_block == 1 and kv_block in BLOCKS and fits


def _lists(candidates: Candidates, q: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Lists of keys, of all queries at once or as many as may be listed at a time."""
    batch, _, q_len, _ = q.shape
    at_once = q_len
    if not candidates.ready:
        # Indices, keys and what the rule says of them stand side by side while lists are made.
        cost = batch * candidates.lists * candidates.width * 32
        at_once = max(1, BYTES_AT_ONCE["cuda"] // cost)
    for first in range(0, q_len, at_once):
        keys = candidates.visible(first, min(first + at_once, q_len))
        yield first, _dense_last(keys)


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, indices, mask_tables, score_tables, *rest = inputs
    ctx.masks = len(mask_tables)
    ctx.rest = rest
    ctx.learned = [t.requires_grad for t in score_tables]
    ctx.save_for_backward(q, k, v, *output, indices, *mask_tables, *score_tables)
    ctx.set_materialize_grads(True)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, indices, *tables = ctx.saved_tensors
    masks, scores = tables[: ctx.masks], tables[ctx.masks :]
    dq, dk, dv, d_learned = torch.ops.flexsparse.gather_backward(
        grad_out, grad_lse, q, k, v, out, lse, indices, masks, scores, *ctx.rest, ctx.learned
    )
    learned = iter(d_learned)
    d_tables = [next(learned) if own else None for own in ctx.learned]
    return dq, dk, dv, None, [None] * ctx.masks, d_tables, None, None, None, None


gather_forward.register_autograd(_differentiate, setup_context=_keep)
gather_backward.register_autograd(refuse_twice)
