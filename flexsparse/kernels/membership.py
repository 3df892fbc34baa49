"""Exact membership as bits packed along the rows: candidate c of row r is bit r % 32 of word [r // 32, c].

Neighbouring keys of one query read neighbouring words, so a kernel's lanes stay together, and the
whole costs one bit a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def pack(indices: Tensor, candidates: int) -> Tensor:
    """``indices [B, H, R, K]``, unique or -1 -> int32 words ``[B, H, ceil(R / 32), candidates]``."""
    batch, heads, rows, _ = indices.shape
    words = -(-rows // WORD)
    # One column more than there are candidates: the unused slots write there.
    packed = torch.zeros(
        (batch, heads, words * (candidates + 1)), dtype=torch.int32, device=indices.device
    )
    row = torch.arange(rows, device=indices.device)
    column = torch.where(indices < 0, candidates, indices).to(torch.int64)
    slot = (row // WORD)[:, None] * (candidates + 1) + column
    one = torch.ones((), dtype=torch.int32, device=indices.device)
    # Each (row, candidate) occurs once, so adding bits is the same as joining them.
    bit = torch.bitwise_left_shift(one, (row % WORD).to(torch.int32))[:, None].expand(slot.shape)
    packed.scatter_add_(-1, slot.flatten(2), bit.reshape(batch, heads, -1))
    return packed.view(batch, heads, words, candidates + 1)[..., :candidates].contiguous()


def word_of(words: Tensor, b: Tensor, h: Tensor, row: Tensor, candidate: Tensor) -> Tensor:
    """The word that holds whether ``candidate`` is one of ``row``'s, for indices that broadcast."""
    return words[b, h, row // WORD, candidate]


def bit_of(word: Tensor, row: Tensor) -> Tensor:
    """What the word says of ``row``."""
    return (torch.bitwise_right_shift(word, row % WORD) & 1) != 0
