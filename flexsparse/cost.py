"""What a way to run a call would take, reckoned from counts before anything is run.

A kernel is given what it multiplies and what it moves; the box, what it can multiply and move at most;
and each kind of kernel the part of that which it has been measured to reach. The larger of both times is
the kernel's.
"""

from __future__ import annotations

import math
from typing import NamedTuple, assert_never

from flexsparse.device.ceiling import Ceilings
from flexsparse.rates import RATES, Rates

Dims = tuple[int, int]

# From so many query heads a KV head on gathered keys are multiplied at another rate.
_MANY_HEADS = 128
# The rows of a tensor core's tile: fewer query heads cost as much.
_LEAST_HEADS = 16
# From so many keys on a candidate is a block, a word of which serves a tile.
_BLOCK = 16


class Tiles(NamedTuple):
    """Tiles of ``rows`` x ``keys`` to visit, over batch and query heads as the kernel has them; how many
    of them ask their pairs for membership, None if none can, and of how many keys a candidate is. One
    program visits up to ``row`` of them forward and ``column`` backward. Of ``partial`` ones the rule is
    asked pair by pair. ``spread``: one word of membership is loaded for eight pairs."""

    number: float
    rows: int
    keys: int
    asked: float | None = None
    block: int = 1
    row: float = 0.0
    column: float = 0.0
    partial: float = 0.0
    spread: bool = False


class Pairs(NamedTuple):
    """Pairs of dense attention over batch and query heads, without the future."""

    number: float


class Gathered(NamedTuple):
    """Keys in lists, over batch, KV heads and queries, each attended to by ``group`` heads; read ``block``
    at a time, 1 where each is read for itself."""

    keys: float
    block: int
    group: int


class Read(NamedTuple):
    """Keys that few queries read, over batch and KV heads."""

    keys: float


Counts = Tiles | Pairs | Gathered | Read


class Job(NamedTuple):
    """All that a way has to do: ``counts`` of a kind of kernel, ``backend`` its name, and bytes of q and
    out ``copied`` around it."""

    backend: str
    counts: Counts
    dims: Dims
    itemsize: int
    grads: bool
    copied: float = 0.0


def predicted_ms(job: Job, box: Ceilings, rates: Rates = RATES) -> float:
    """What a job would take on a box."""
    counts, dims, grads = job.counts, job.dims, job.grads
    match counts:
        case Tiles():
            ms = tiled_ms(counts, job.backend, dims, box, grads=grads, rates=rates)
        case Pairs():
            ms = dense_ms(counts.number, dims, box, grads=grads, rates=rates)
        case Gathered():
            ms = gathered_ms(*counts, dims, job.itemsize, box, grads=grads, rates=rates)
        case Read():
            ms = read_ms(counts.keys * sum(dims) * job.itemsize, box, rates)
        case _:
            assert_never(counts)
    return ms + (moved_ms(job.copied * (1 + grads), box, rates) if job.copied else 0.0)


def tiled_ms(
    tiles: Tiles, backend: str, dims: Dims, box: Ceilings, *, grads: bool, rates: Rates = RATES
) -> float:
    """Forward, and with ``grads`` backward too, of a kernel that visits tiles."""
    forward, backward = _reached(backend, dims, rates)
    slower = (1.0, 1.0)
    if tiles.spread:
        slower = (rates.spread, rates.spread_back)
    elif tiles.asked is not None:
        part = tiles.asked / tiles.number if tiles.number else 0.0
        kind = "tokens" if tiles.block < _BLOCK else "blocks"
        slower = (_slower(kind, "", part, rates), _slower(kind, "_back", part, rates))
    area, speed = tiles.rows * tiles.keys, box.matmul_flops_per_s * _of_height(tiles.rows, rates)
    # The longest walk of one program takes as long as it takes, however many others there are.
    walked = max(tiles.number, tiles.row * box.processors)
    masked = _masked(tiles, backend, "", rates)
    time = walked * area * _flops(dims) / (speed * forward) * slower[0] * masked
    if grads:
        again = max(
            tiles.number * _backward_flops(dims), tiles.column * box.processors * 2 * _flops(dims)
        )
        masked = _masked(tiles, backend, "_back", rates)
        time += again * area / (speed * backward) * slower[1] * masked
    return 1e3 * (time + rates.launch)


def step_ms(
    tile: tuple[int, int], backend: str, dims: Dims, box: Ceilings, rates: Rates = RATES
) -> float:
    """What one program takes forward for a tile of ``tile`` rows and keys, where all processors are busy."""
    forward, _ = _reached(backend, dims, rates)
    speed = box.matmul_flops_per_s * _of_height(tile[0], rates)
    return 1e3 * tile[0] * tile[1] * box.processors * _flops(dims) / (speed * forward)


def dense_ms(
    pairs: float, dims: Dims, box: Ceilings, *, grads: bool, rates: Rates = RATES
) -> float:
    """Of ``pairs`` over batch and query heads by torch's fastest dense kernel, which skips the future."""
    forward, backward = _reached("dense", dims, rates)
    time = pairs * _flops(dims) / (box.matmul_flops_per_s * forward)
    if grads:
        time += pairs * _backward_flops(dims) / (box.matmul_flops_per_s * backward)
    return 1e3 * (time + rates.launch)


def moved_ms(bytes_moved: float, box: Ceilings, rates: Rates = RATES) -> float:
    """Of bytes read and as many written."""
    return 1e3 * (2 * bytes_moved / box.copy_bytes_per_s + rates.launch)


def read_ms(bytes_read: float, box: Ceilings, rates: Rates = RATES) -> float:
    """Of bytes that a kernel for few queries reads once."""
    return 1e3 * (bytes_read / (box.copy_bytes_per_s * rates.decode) + rates.launch)


def gathered_ms(
    keys: float,
    block: int,
    group: int,
    dims: Dims,
    itemsize: int,
    box: Ceilings,
    *,
    grads: bool,
    rates: Rates = RATES,
) -> float:
    """Of ``keys`` in lists, over batch, KV heads and queries, each attended to by ``group`` heads; read
    ``block`` at a time, 1 where each is read for itself."""
    heads = max(_LEAST_HEADS, group)
    kind = "_blocks" if block > 1 else "_many" if heads >= _MANY_HEADS else ""
    bandwidth = box.copy_bytes_per_s
    read = (
        sum(dims)
        * itemsize
        / (bandwidth * (rates.gather_bytes if block == 1 else rates.gather_blocks_bytes))
    )
    forward: float = getattr(rates, f"gather{kind}")
    time = max(heads * _flops(dims) / (box.matmul_flops_per_s * forward), read)
    if grads:
        backward: float = getattr(rates, f"gather{kind}_back")
        computing = heads * _backward_flops(dims) / (box.matmul_flops_per_s * backward)
        # Keys and values are read again. Their gradients are added key by key, or a block reads its readers.
        if block == 1:
            adding = sum(dims) * 4 / (bandwidth * rates.gather_adds)
            time += max(computing, read, adding)
        else:
            time += max(computing, read * (1 + heads / block))
    return 1e3 * (keys * time + rates.launch)


def _reached(backend: str, dims: Dims, rates: Rates) -> tuple[float, float]:
    """Parts of the matmul ceiling, forward and backward, on these head dims."""
    halved = max(0.0, math.log2(256 / sum(dims)))
    forward: float = getattr(rates, backend) * getattr(rates, f"{backend}_half") ** halved
    half_back = getattr(rates, f"{backend}_half_back")
    backward: float = getattr(rates, f"{backend}_back") * half_back**halved
    return forward, backward


def _of_height(rows: int, rates: Rates) -> float:
    """What of the speed of tiles of 128 rows is left for such."""
    # A kernel computes a tile in pieces whose heights are powers of two.
    piece = max(16, math.gcd(rows, 128)) if rows % 16 == 0 else 16
    share: float = 1.0 if piece == 128 else getattr(rates, f"rows_{piece}")
    return share


def _masked(tiles: Tiles, backend: str, way: str, rates: Rates) -> float:
    more: float = getattr(rates, f"{backend}_masked{way}")
    return 1 + more * min(1.0, tiles.partial / tiles.number) if tiles.number else 1.0


def _slower(kind: str, way: str, part: float, rates: Rates) -> float:
    least: float = getattr(rates, f"{kind}_none{way}")
    most: float = getattr(rates, f"{kind}_all{way}")
    return least + part * (most - least)


def _flops(dims: Dims) -> int:
    """Of one pair: its score, and its share of the output."""
    return 2 * sum(dims)


def _backward_flops(dims: Dims) -> int:
    """Of one pair: its score anew, dP, dQ, dK and dV."""
    return 2 * (3 * dims[0] + 2 * dims[1])
