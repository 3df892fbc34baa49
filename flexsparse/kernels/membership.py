"""Exact membership as bits packed along the rows: candidate c of row r is bit r % 8 of word [r // 8, c].

Neighbouring keys of one query read neighbouring words, so a kernel's lanes stay together, and the
whole costs one bit a pair. Words are bytes: a kernel holds one for each pair of the tiles that it has in
flight, in the memory that it shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 8


def pack(indices: Tensor, candidates: int) -> Tensor:
    """``indices [B, H, R, K]``, unique or -1 -> uint8 words ``[B, H, ceil(R / 8), candidates]``."""
    batch, heads, rows, _ = indices.shape
    words = -(-rows // WORD)
    # One column more than there are candidates: the unused slots write there.
    packed = torch.zeros(
        (batch, heads, words * (candidates + 1)), dtype=torch.uint8, device=indices.device
    )
    row = torch.arange(rows, device=indices.device)
    column = torch.where(indices < 0, candidates, indices).to(torch.int64)
    slot = (row // WORD)[:, None] * (candidates + 1) + column
    one = torch.ones((), dtype=torch.uint8, device=indices.device)
    # Each (row, candidate) occurs once, so adding bits is the same as joining them.
    bit = torch.bitwise_left_shift(one, (row % WORD).to(torch.uint8))[:, None].expand(slot.shape)
    packed.scatter_add_(-1, slot.flatten(2), bit.reshape(batch, heads, -1))
    return packed.view(batch, heads, words, candidates + 1)[..., :candidates].contiguous()


def word_of(words: Tensor, b: Tensor, h: Tensor, row: Tensor, candidate: Tensor) -> Tensor:
    """The word that holds whether ``candidate`` is one of ``row``'s, for indices that broadcast."""
    if words.numel() >= 2**31:
        # In a kernel indices are of 32 bits, and so is what they are multiplied to.
        row = row.to(torch.int64)
    return words[b, h, row // WORD, candidate]


def bit_of(word: Tensor, row: Tensor) -> Tensor:
    """What the word says of ``row``."""
    return (torch.bitwise_right_shift(word, row % WORD) & 1) != 0
