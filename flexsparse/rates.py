"""What kernels have been measured to reach, of what a box can do."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Parts of a ceiling unless said otherwise; of one H200 in bf16.

    ``NAME`` and ``NAME_back`` are a kernel's parts of the matmul ceiling forward and in its backward, on
    head dims of 128; at half of that ``NAME_half`` of either is left. See configs/bench/RESULTS.md.
    """

    # Block top-k, 16 of 256 blocks, 32 heads, S=32768; dense is cuDNN, causal.
    flash: float = 0.74
    flash_back: float = 0.58
    flash_half: float = 0.8
    flex: float = 0.51
    flex_back: float = 0.43
    flex_half: float = 0.8
    dense: float = 0.755
    dense_back: float = 0.72
    dense_half: float = 0.8
    # By the height of a tile, of the speed of one of 128 rows: blocks of 64 keys which 8 neighbours
    # share, so that every height visits the same pairs (2.20, 3.76 and 6.38 ms; 4.35 without a mask).
    rows_64: float = 0.585
    rows_32: float = 0.345
    rows_16: float = 0.303
    # How much longer tiles take whose kernel can ask for membership, where none of them asks and where
    # all do: of single keys (S=16384, 2040 tiles) and of blocks of 64 keys.
    tokens_none: float = 1.2
    tokens_all: float = 1.36
    tokens_none_back: float = 1.4
    tokens_all_back: float = 1.75
    blocks_none: float = 1.67
    blocks_all: float = 2.13
    blocks_none_back: float = 1.4
    blocks_all_back: float = 1.5
    # Gathered keys, forward and with backward: 1024 keys a query, S=16384, 4 and 64 query heads a KV
    # head, and from 128 on; and times the copy ceiling, as most of them come from cache.
    gather: float = 0.24
    gather_both: float = 0.17
    gather_many: float = 0.26
    gather_many_both: float = 0.23
    gather_bytes: float = 1.06
    # The same of whole blocks: 16 of 64 keys a query, 16 query heads a KV head, S=16384.
    gather_blocks: float = 0.147
    gather_blocks_both: float = 0.147
    gather_blocks_bytes: float = 1.6
    # Of the copy ceiling, that of reading twice over: 32 pages of 64 keys, 32 sequences, 8 KV heads.
    decode: float = 0.93
    # What a kernel takes to begin and end, in s.
    launch: float = 5e-6


RATES = Rates()
