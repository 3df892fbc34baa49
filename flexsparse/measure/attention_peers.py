"""Attention of other libraries over a row's problem, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from flexsparse.device import compiled_alone
from flexsparse.measure.contender import UnfitError, installed
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.peers import FLASHINFER_WORKSPACE, flashinfer_blocks, vsa_indices
from flexsparse.measure.problem import Problem
from flexsparse.measure.rival import Rival, rival
from flexsparse.measure.timed import QKV

PeerName = Literal["flex dense", "fla", "attn_gym", "flashinfer"]
# Rows and keys of torch's own BlockMask.
_TILE = 128


def flex_dense(made: Conversion) -> Rival:
    """torch's FlexAttention, compiled, over all that dense attention sees."""
    problem, qkv = _on_cuda(made)
    grid = problem.grid
    if problem.causal and grid.q_len != grid.kv_len:
        raise UnfitError("its causal lists are made for as many queries as keys")
    mask = causal_mask(grid.q_len, problem.device) if problem.causal else None
    attend = _flex(_kind(qkv, "dense" if mask is None else "causal"))
    return Rival(
        qkv, lambda q, k, v: attend(q, k, v, mask), lambda q, k, v: attend(q, k, v, mask),
        "dense: all pairs, lists made before",
    )  # fmt: skip


def fla_nsa(made: Conversion) -> Rival:
    """fla-core's kernel of Native Sparse Attention, its selected branch alone."""
    problem, (q, k, v) = _on_cuda(made)
    nsa = installed("fla.ops.nsa.parallel", "fla")
    heads, kv_heads = problem.heads
    group = heads // kv_heads
    if problem.indices is None or problem.q_block != 1 or problem.kv_block < 16:
        raise UnfitError("it takes blocks of at least 16 keys for each token")
    if group < 16 or group & (group - 1):
        raise UnfitError(f"it takes a power of two from 16 up of heads a KV head, not {group}")
    if problem.indices.shape[1] != kv_heads:
        raise UnfitError("it takes a list per KV head")
    chosen = problem.indices.transpose(1, 2).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = nsa.parallel_nsa(
            q, k, v, block_indices=chosen, block_counts=chosen.shape[-1],
            block_size=problem.kv_block,
        )  # fmt: skip
        return out

    return Rival(
        (_swapped(q), _swapped(k), _swapped(v)), attend, attend,
        "the same, tokens before heads; indices are its input, means of blocks are made beside",
        _swapped,
    )  # fmt: skip


def attn_gym(made: Conversion) -> Rival:
    """attention-gym: its BlockMask of square tiles under FlexAttention, or its gather of tokens."""
    problem, qkv = _on_cuda(made)
    if problem.indices is not None and problem.q_block == problem.kv_block == 1:
        return _gathered(problem, qkv)
    vsa = installed("attn_gym.masks.vsa", "attn_gym")
    if problem.grid.q_len == 1 or problem.q_block == 1:
        raise UnfitError("it takes square tiles, or tokens under one list")
    indices, tile, columns = vsa_indices(made)
    q, k, v = (_folded(x, problem.heads[1]) for x in qkv)
    flex = _flex(_kind((q, k, v), "tiles"))

    def mask() -> Any:
        return vsa.create_vsa_block_mask(indices, tile, columns)

    once = mask()
    note = "from indices without -1; KV heads folded by hand"
    if problem.rule is not None:
        note += "; not causal within own blocks"
    return Rival(
        (q, k, v), lambda q, k, v: flex(q, k, v, mask()), lambda q, k, v: flex(q, k, v, once), note
    )


def flashinfer(made: Conversion) -> Rival:
    """FlashInfer: blocks of its variable block-sparse wrapper, or pages of its decode wrapper."""
    problem, qkv = _on_cuda(made)
    if problem.scores is not None:
        return _paged(problem, qkv)
    wrapper, plan = flashinfer_blocks(made)

    def ready(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = wrapper.run(q, k, v)
        return out

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan()
        return ready(q, k, v)

    q, k, v = (x.flatten(0, 1) for x in qkv)
    note = "from indices: scatter, plan, run"
    back: Callable[[Tensor], Tensor] | None = lambda out: out.view_as(qkv[0])  # noqa: E731
    if problem.rule is not None:
        note, back = f"{note}; not causal within own blocks", None
    return Rival((q, k, v), attend, ready, note, back, no_backward="it has no backward")


PEERS: dict[PeerName, Callable[[Conversion], Rival]] = {
    "flex dense": flex_dense,
    "fla": fla_nsa,
    "attn_gym": attn_gym,
    "flashinfer": flashinfer,
}


def peer(name: PeerName, made: Conversion, patience: float) -> dict[str, Any]:
    """The times of a peer, or in ``reason`` why there are none."""
    found: dict[str, Any] = rival(name, PEERS[name], made, patience)
    return found


def causal_mask(length: int, device: torch.device) -> Any:
    """torch's BlockMask of causal attention, from its lists: no pair is evaluated.

    >>> causal_mask(300, torch.device("cpu")).to_dense()[0, 0].tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows = -(-length // _TILE)
    at = torch.arange(rows, dtype=torch.int32, device=device)
    own = at[:, None].repeat(1, rows)
    past = at[None].repeat(rows, 1)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    ones, own, at, past = (x[None, None] for x in (torch.ones_like(at), own, at, past))
    return BlockMask.from_kv_blocks(
        ones,
        own,
        at,
        past,
        BLOCK_SIZE=_TILE,
        mask_mod=causal,
        seq_lengths=(length, length),
    )


def _gathered(problem: Problem, qkv: QKV) -> Rival:
    """attention-gym's gather: K and V are one tensor, so V is left out."""
    gather = installed("attn_gym.sparse.gather_attn", "attn_gym")
    q, k, _ = qkv
    if k.shape[1] not in (1, q.shape[1]):
        raise UnfitError("it takes one KV head, or one for each query head")
    selection = problem.select()
    assert selection is not None
    if selection.heads != 1:
        raise UnfitError("it takes one list for all heads")
    chosen = selection.indices[:, 0].contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = gather.gather_attn(q, k, k, chosen, sliding_window_size=0)
        return out

    note = "K and V are one tensor; sets given, which it does not make"
    return Rival(qkv, attend, attend, note, no_backward="not timed: V would have no gradient")


def _paged(problem: Problem, qkv: QKV) -> Rival:
    """Each KV head of each sequence as a request over its own pages."""
    library = installed("flashinfer", "flashinfer")
    page, indices = problem.kv_block, problem.indices
    assert indices is not None
    batch, (heads, kv_heads) = problem.grid.batch, problem.heads
    pages, lists = problem.grid.kv_len // page, batch * kv_heads
    if problem.grid.kv_len % page:
        raise UnfitError("it is given whole pages here")
    q, k, v = qkv
    keep, group = indices.shape[-1], heads // kv_heads
    device = problem.device
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device), use_tensor_cores=True
    )
    begins = torch.arange(lists + 1, dtype=torch.int32, device=device) * keep
    last = torch.full((lists,), page, dtype=torch.int32, device=device)
    base = torch.arange(lists, device=device)[:, None] * pages

    def plan() -> None:
        tables = (indices.reshape(lists, keep) + base).flatten().to(torch.int32)
        wrapper.plan(
            begins, tables, last, group, 1, problem.head_dim, page,
            q_data_type=problem.dtype, kv_data_type=problem.dtype,
        )  # fmt: skip

    def ready(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = wrapper.run(q, (k, v))
        return out

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan()
        return ready(q, k, v)

    cache = [x.reshape(lists * pages, page, 1, -1) for x in (k, v)]
    return Rival(
        (q.reshape(lists, group, -1), cache[0], cache[1]), attend, ready,
        "the same, a request for each KV head; plan on the host at every call",
        lambda out: out.reshape(q.shape), no_backward="it has no backward",
    )  # fmt: skip


@cache
def _flex(kind: tuple[object, ...]) -> Callable[..., Tensor]:
    """FlexAttention compiled for one kind of call, with all that differs between kinds in it."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    return compiled_alone(attend, dynamic=False)


def _kind(qkv: QKV, mask: str) -> tuple[object, ...]:
    return (mask, *((x.dtype, x.shape) for x in qkv))


def _on_cuda(made: Conversion) -> tuple[Problem, QKV]:
    if made.problem.device.type != "cuda":
        raise UnfitError("it needs a CUDA device")
    assert made.qkv is not None
    q, k, v = (x.detach() for x in made.qkv)
    return made.problem, (q, k, v)


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _folded(x: Tensor, kv_heads: int) -> Tensor:
    """KV heads in the batch."""
    return x.reshape(x.shape[0] * kv_heads, x.shape[1] // kv_heads, *x.shape[2:])
