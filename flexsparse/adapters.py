"""External index forms, each by the name of who makes it. They convert and nothing more."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.selection import OutOfRange, Selection


def dsa(indices: Tensor, *, kv_len: int, out_of_range: OutOfRange = "error") -> Selection:
    """DeepSeek Sparse Attention: token ids ``[B, S_q, k]``, one list for all heads, unsorted.

    The lists may name future positions where fewer than k keys are visible: causality is the
    rule's. Source: DeepSeek-V3.2, 2025, section 2.1 (lightning indexer); the form is that of
    transformers' ``indices``.
    """
    _expect(indices, "dsa", "[B, S_q, k]", 3)
    return Selection.from_indices(
        indices[:, None], kv_len=kv_len, q_len=indices.shape[1], out_of_range=out_of_range
    )


def attn_gym(kv_indices: Tensor, *, kv_len: int, out_of_range: OutOfRange = "error") -> Selection:
    """attention-gym's ``selected_attention``: token ids ``[B, S, K]``, -1 for empty.

    There a repeated id weighs as often as it is named; here candidates are sets.
    """
    _expect(kv_indices, "attn_gym", "[B, S, K]", 3)
    return Selection.from_indices(
        kv_indices[:, None], kv_len=kv_len, q_len=kv_indices.shape[1], out_of_range=out_of_range
    )


def msa(
    block_indices: Tensor, *, kv_len: int, block: int, out_of_range: OutOfRange = "error"
) -> Selection:
    """MiniMax sparse attention: block ids ``[B, H_kv, S_q, k]`` per query token, -1 right-padded.

    Blocks of ``block`` positions, anchored to the key slots.
    """
    _expect(block_indices, "msa", "[B, H_kv, S_q, k]", 4)
    return Selection.from_indices(
        block_indices,
        kv_len=kv_len,
        q_len=block_indices.shape[2],
        kv_block=block,
        out_of_range=out_of_range,
    )


def nsa(
    block_indices: Tensor, *, kv_len: int, block: int, out_of_range: OutOfRange = "error"
) -> Selection:
    """Native Sparse Attention as in flash-linear-attention: block ids ``[B, T, H_kv, S]``, -1 unused.

    Source: Yuan et al., "Native Sparse Attention", 2025, https://arxiv.org/abs/2502.11089, 3.3.2.
    """
    _expect(block_indices, "nsa", "[B, T, H_kv, S]", 4)
    return Selection.from_indices(
        block_indices.transpose(1, 2),
        kv_len=kv_len,
        q_len=block_indices.shape[1],
        kv_block=block,
        out_of_range=out_of_range,
    )


def _expect(indices: Tensor, name: str, form: str, axes: int) -> None:
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        given = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise ArgumentError(f"adapters.{name} needs an int32 or int64 tensor {form}, got {given}")
    if indices.ndim != axes:
        other = "dsa or attn_gym" if indices.ndim == 3 else "msa or nsa"
        own = ", or of Selection.from_indices" if indices.ndim == 4 else ""
        hint = (
            f"; {indices.ndim} axes are the form of adapters.{other}{own}"
            if indices.ndim in (3, 4)
            else ""
        )
        raise ShapeError(f"adapters.{name} needs {form}, got shape {list(indices.shape)}{hint}")
