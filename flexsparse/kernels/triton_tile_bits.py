"""`tile_bits` as one kernel: a program some words of a list, which add up the bits of its tiles."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

_MOST_WORDS = 32
_ENTRIES = 64
_WARPS = 2


@triton.jit
def _bits(
    partial_num, partial_idx, full_num, full_idx, bits, lists, words, partial_wide, full_wide,
    WORDS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    of = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    plane = tl.program_id(2)
    if plane == 0:
        count = tl.load(partial_num + of)
        line = partial_idx + of * partial_wide
    else:
        count = tl.load(full_num + of)
        line = full_idx + of * full_wide
    found = tl.zeros([WORDS], tl.int32)
    for start in range(0, count, ENTRIES):
        step = start + tl.arange(0, ENTRIES)
        tile = tl.load(line + step, mask=step < count, other=-1)
        # A tile stands once in a list, so that its bit is added once.
        here = (tile[None, :] >> 5) == word[:, None]
        bit = tl.full([WORDS, ENTRIES], 1, tl.int32) << (tile[None, :] & 31)
        found += tl.sum(tl.where(here, bit, 0), 1)
    tl.store(bits + (plane * lists + of) * words + word, found, mask=word < words)


def launch(lists: Sequence[Tensor], columns: int) -> Tensor:
    partial_num, partial_idx, full_num, full_idx = (x.contiguous() for x in lists)
    words = ceil_div(columns, 32)
    bits = partial_num.new_empty((2, *partial_num.shape, words))
    number = partial_num.numel()
    at_once = min(_MOST_WORDS, next_power_of_two(words))
    dispatch(
        _bits, (number, ceil_div(words, at_once), 2),
        partial_num, partial_idx, full_num, full_idx, bits, number, words,
        partial_idx.shape[-1], full_idx.shape[-1],
        WORDS=at_once, ENTRIES=_ENTRIES, num_warps=_WARPS,
    )  # fmt: skip
    return bits
