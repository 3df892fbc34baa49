"""What a way to run a call would take, reckoned from counts before anything is run.

A kernel is given what it multiplies and what it moves; the box, what it can multiply and move at most;
and each kind of kernel the part of that which it has been measured to reach. The larger of both times is
the kernel's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flexsparse.device.ceiling import Ceilings

Dims = tuple[int, int]

# Parts of the matmul ceiling reached forward and backward on one H200 in bf16 with head dims of 128:
# block top-k, 16 of 256 blocks, 32 heads, S=32768; dense is cuDNN, causal. See configs/bench/RESULTS.md.
_REACHED = {
    "flash": (0.74, 0.58),
    "flex": (0.51, 0.43),
    "dense": (0.755, 0.72),
}
# By the height of a tile, what of the speed of one of 128 rows is left: blocks of 64 keys which 8
# neighbours share, so that every height visits the same pairs (2.20, 3.76 and 6.38 ms; 4.35 without a mask).
_BY_ROWS = {128: 1.0, 64: 0.585, 32: 0.345, 16: 0.303}
# How much longer tiles take whose kernel can ask for membership, where none of them asks and where all do:
# forward and backward, of single keys (S=16384, 2040 tiles) and of blocks of 64 keys.
_TOKENS = ((1.2, 1.36), (1.4, 1.75))
_BLOCKS = ((1.67, 2.13), (1.4, 1.5))
# Gathered keys: parts of the matmul ceiling, forward and with backward, and times the copy ceiling, as
# most of them come from cache: 1024 keys a query, S=16384, 4, 64 and 128 query heads a KV head.
_GATHERED = (0.24, 0.17)
_GATHERED_BY_MANY = (0.26, 0.23)
_MANY_HEADS = 128
_GATHERED_BYTES = 1.06
# The rows of a tensor core's tile: fewer query heads cost as much.
_LEAST_HEADS = 16
# From so many keys on a candidate is a block, a word of which serves a tile.
_BLOCK = 16
# What a kernel takes to begin and end, in s.
_LAUNCH = 5e-6


class Tiles(NamedTuple):
    """Tiles of ``rows`` x ``keys`` to visit, over batch and query heads as the kernel has them; how many
    of them ask their pairs for membership, None if none can, and of how many keys a candidate is. One
    program visits up to ``row`` of them forward and ``column`` backward."""

    number: float
    rows: int
    keys: int
    asked: float | None = None
    block: int = 1
    row: float = 0.0
    column: float = 0.0


def tiled_ms(tiles: Tiles, backend: str, dims: Dims, box: Ceilings, *, grads: bool) -> float:
    """Forward, and with ``grads`` backward too, of a kernel that visits tiles."""
    forward, backward = _REACHED[backend]
    # A kernel computes a tile in pieces whose heights are powers of two.
    share = _BY_ROWS[math.gcd(tiles.rows, 128)] if tiles.rows % 16 == 0 else _BY_ROWS[16]
    slower = [1.0, 1.0]
    if tiles.asked is not None:
        part = tiles.asked / tiles.number if tiles.number else 0.0
        times = _TOKENS if tiles.block < _BLOCK else _BLOCKS
        slower = [least + part * (most - least) for least, most in times]
    area, speed = tiles.rows * tiles.keys, box.matmul_flops_per_s * share
    # The longest walk of one program takes as long as it takes, however many others there are.
    walked = max(tiles.number, tiles.row * box.processors)
    time = walked * area * _flops(dims) / (speed * forward) * slower[0]
    if grads:
        again = max(
            tiles.number * _backward_flops(dims), tiles.column * box.processors * 2 * _flops(dims)
        )
        time += again * area / (speed * backward) * slower[1]
    return 1e3 * (time + _LAUNCH)


def dense_ms(pairs: float, dims: Dims, box: Ceilings, *, grads: bool) -> float:
    """Of ``pairs`` over batch and query heads by torch's fastest dense kernel, which skips the future."""
    forward, backward = _REACHED["dense"]
    time = pairs * _flops(dims) / (box.matmul_flops_per_s * forward)
    if grads:
        time += pairs * _backward_flops(dims) / (box.matmul_flops_per_s * backward)
    return 1e3 * (time + _LAUNCH)


def moved_ms(bytes_moved: float, box: Ceilings) -> float:
    """Of bytes read and as many written."""
    return 1e3 * (2 * bytes_moved / box.copy_bytes_per_s + _LAUNCH)


def gathered_ms(
    keys: float, block: int, group: int, dims: Dims, itemsize: int, box: Ceilings, *, grads: bool
) -> float:
    """Of ``keys`` in lists, over batch, KV heads and queries, each attended to by ``group`` heads; read
    ``block`` at a time, 1 where each is read for itself."""
    heads = max(_LEAST_HEADS, group)
    flops, moved = heads * _flops(dims), float(sum(dims) * itemsize)
    if grads:
        flops += heads * _backward_flops(dims)
        # Keys and values are read again. Their gradients are added in fp32, or a block reads its readers.
        added = sum(dims) * (4 if block == 1 else heads * itemsize / block)
        moved = 2 * moved + added
    reached = _GATHERED_BY_MANY if heads >= _MANY_HEADS else _GATHERED
    computing = keys * flops / (box.matmul_flops_per_s * reached[grads])
    moving = keys * moved / (box.copy_bytes_per_s * _GATHERED_BYTES)
    return 1e3 * (max(computing, moving) + _LAUNCH)


def _flops(dims: Dims) -> int:
    """Of one pair: its score, and its share of the output."""
    return 2 * sum(dims)


def _backward_flops(dims: Dims) -> int:
    """Of one pair: its score anew, dP, dQ, dK and dV."""
    return 2 * (3 * dims[0] + 2 * dims[1])
