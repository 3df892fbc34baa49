"""What kernels have been measured to reach, of what a box can do."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Parts of a ceiling unless said otherwise; in bf16, between what 96 calls took on one H200 and 60 on another.

    ``NAME`` and ``NAME_back`` are a kernel's parts of the matmul ceiling forward and in its backward, on
    head dims of 128; at half of that ``NAME_half`` and ``NAME_half_back`` of them are left. See configs/bench/RESULTS.md.
    """

    # Block top-k, 16 of 256 blocks, 32 heads, S=32768; dense is cuDNN, causal.
    flash: float = 0.84
    flash_back: float = 0.76
    flash_half: float = 0.71
    flash_half_back: float = 0.69
    # How much longer a tile takes of which the rule is asked pair by pair.
    flash_masked: float = 1.28
    flash_masked_back: float = 1.15
    flex: float = 0.476
    flex_back: float = 0.467
    flex_half: float = 1.2
    flex_half_back: float = 0.7
    flex_masked: float = 0.456
    flex_masked_back: float = 0.422
    dense: float = 0.718
    dense_back: float = 0.745
    dense_half: float = 0.796
    dense_half_back: float = 0.796
    # By the height of a tile, of the speed of one of 128 rows: blocks of 64 keys which 2 or 8 neighbours
    # share (2.28, 2.33 and 2.92 ms for the same pairs, and 3.92 for 16 rows; S=16384).
    rows_64: float = 0.98
    rows_32: float = 0.8
    rows_16: float = 0.405
    # How much longer tiles take whose kernel can ask for membership, where none of them asks and where
    # all do: of single keys (S=16384, 2040 tiles) and of blocks of 64 keys.
    tokens_none: float = 1.2
    tokens_all: float = 1.3
    tokens_none_back: float = 1.4
    tokens_all_back: float = 1.75
    # And where one word of single keys is loaded for eight pairs (S=16384, 1928 tiles).
    spread: float = 1.2
    spread_back: float = 1.24
    blocks_none: float = 1.48
    blocks_all: float = 1.83
    blocks_none_back: float = 1.2
    blocks_all_back: float = 1.76
    # Gathered keys: 1024 keys a query, S=16384, 4 and 64 query heads a KV head, and from 128 on; times
    # the copy ceiling, as most of them come from cache; and of it what atomics add, 4 bytes a number.
    gather: float = 0.211
    gather_back: float = 0.142
    gather_many: float = 0.254
    gather_many_back: float = 0.196
    gather_bytes: float = 0.946
    gather_adds: float = 0.634
    # The same of whole blocks: 16 of 64 keys a query, 16 query heads a KV head, S=16384.
    gather_blocks: float = 0.147
    gather_blocks_back: float = 0.123
    gather_blocks_bytes: float = 1.4
    # Of the copy ceiling, that of reading twice over: 32 pages of 64 keys, 32 sequences, 8 KV heads.
    decode: float = 0.907
    # What a kernel takes to begin and end, in s.
    launch: float = 5.8e-6


RATES = Rates()


class Cutting(NamedTuple):
    """What cutting long rows saves and costs; of one H200 in bf16, see configs/bench/RESULTS.md.

    With 1 % of rows holding 30 % of the work, S=32768, 32 query heads over 8 KV heads of 128, tiles of 128,
    flex took forward 1.518 ms, cut 1.307, and 1.126 where as much work is spread evenly. With gradients it
    took 5.50 ms, and cut 5.81; flash took 0.963, and cut 2.056. So neither of these is cut unasked.
    """

    # Of the time in which one program walks the longest row: what all others wait for it.
    waits: float = 0.75
    # What a layout takes longer that is cut anew for each call, in s: a launch by the host.
    layout: float = 5e-5
    # What of the whole time is to be saved.
    least: float = 0.05


CUTTING = Cutting()
