"""How much neighbouring queries share: the tiles that rows of candidates come to under each size of tile.

Tall tiles fill the tensor cores, and a tile must visit what any of its queries selects. Which height
pays depends on the data alone, so it is counted, on a sample, when a plan is made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.cost import Tiles, tiled_ms
from flexsparse.device import Ceilings
from flexsparse.grid import Grid
from flexsparse.kernels.geometry import Geometry
from flexsparse.selection import Selection
from flexsparse.shapes import ceil_div, common_multiple

Size = tuple[int, int]

# Candidates of a sample, and entries of the map that it is counted in.
_ENTRIES = 2**24
# Times are compared, so that any box does.
_BOX = Ceilings(4e12, 7e14, 132)
_DIMS = (128, 128)
# What a rule makes of each tile is a byte on the device: shorter tiles than that allows are no choice.
MOST_TILES = 2**28

# Plain torch on CPU, all rows in step: what a tile takes beside its pairs, counted in pairs, for each of its
# rows and keys, for itself, and for each step of the longest row. Two cores, fp32, head dim 64, S=1024,
# blocks of 16 and 64: 600 us for 128x128, 130 for 64x64, 55 for 32x32 and 20 for 16x16.
_EDGE = 10
_TILE = 160
_STEP = 20_000
# A smaller tile is taken where less than this is predicted of the time of the larger.
_ENOUGH = 0.85
# Entries and lists of a sample there; pairs of a call, and keys of a candidate, from which on it is worth one.
# A look takes 3 to 8 ms of such a box; heads of 32, blocks of 16, in ms at 128x128 and at 16x16: 15 and 5
# for 2**18.6 pairs, 26 and 10 for 2**19.8, 48 and 12 for 2**20.5; with gradients 37 and 38, 80 and 49.
_FEW_ENTRIES = 2**18
_FEW_LISTS = 4
LEAST_PAIRS = 2**19
LEAST_BLOCK = 16
# A list of tiles for each row of them, and a map of them all, are held.
_MOST_LISTED = 2**24


class Met(NamedTuple):
    """Tiles that any of their queries touches, and how many of them all of their queries touch; the most
    tiles of a row, and of a column of one list."""

    tiles: float
    agreed: float
    row: float
    column: float


def tiles_met(
    select: Selection,
    grid: Grid,
    heads: tuple[int, int],
    sizes: Sequence[Size],
    entries: int | None = None,
) -> list[Met]:
    """What the candidates come to under tiles of each of ``sizes`` (queries, keys), over batch and KV heads.

    ``heads`` is ``(Hq, Hkv)``. The rule is not asked. Counted on evenly spaced stretches of queries
    where all would be more than so many ``entries``; reads the device once.
    """
    stretch = math.lcm(*(queries for queries, _ in sizes))
    there = ceil_div(grid.q_len, stretch)
    lists = select.shape[:2].numel()
    columns = ceil_div(grid.kv_len, min(keys for _, keys in sizes))
    widest = max(columns, select.shape[3])
    count = max(1, min(there, (entries or _ENTRIES) // (lists * stretch * widest)))
    device = select.device
    begins = torch.tensor([i * there // count * stretch for i in range(count)], device=device)
    query = (begins[:, None] + torch.arange(stretch, device=device)).flatten()
    past = (query >= grid.q_len)[:, None]
    touched = {keys: _touched(select, grid, query, keys) for _, keys in sizes}
    counts = []
    for queries, keys in sizes:
        some = touched[keys].unflatten(2, (-1, queries)).any(3)
        every = (touched[keys] | past).unflatten(2, (-1, queries)).all(3)
        counts += [some.sum(), (some & every).sum(), some.sum(-1).amax(), some.sum(-2).amax()]
    found: list[list[int]] = torch.stack(counts).view(-1, 4).tolist()
    all_rows = there / count
    whole = grid.batch * heads[1] / lists * all_rows
    return [
        Met(tiles * whole, agreed * whole, row, column * all_rows)
        for tiles, agreed, row, column in found
    ]


def best_rows(
    select: Selection, grid: Grid, heads: tuple[int, int], keys: int
) -> tuple[int, float]:
    """The height of tiles of ``keys`` columns, in rows of G heads beside each query, that is predicted
    to take the least time; and how many times the tiles of one query a row of such tiles visits."""
    group = heads[0] // heads[1]
    every = heights(group)
    rows = [n for n in every if math.prod(grid.shape(n // group, keys)) <= MOST_TILES] or every[-1:]
    sizes = [(1, keys), *((height // group, keys) for height in rows)]
    one, *met = tiles_met(select, grid, heads, sizes)
    costs = [
        _flex_ms(select, m, (height // group, keys), height)
        for m, height in zip(met, rows, strict=True)
    ]
    # Where two cost the same, the taller has fewer tiles to list.
    at = min(range(len(rows)), key=lambda i: (costs[i], -rows[i]))
    alone = one.tiles / grid.q_len * ceil_div(grid.q_len, rows[at] // group)
    return rows[at], met[at].tiles / alone if alone else 1.0


def _flex_ms(select: Selection, met: Met, size: Size, rows: int) -> float:
    """What FlexAttention takes for tiles of ``size`` (queries, keys), of so many ``rows``."""
    return tiled_ms(
        Tiles(met.tiles, rows, size[1], asked(select, met, size), select.kv_block),
        "flex", _DIMS, _BOX, grads=False,
    )  # fmt: skip


def asked(select: Selection, met: Met, size: Size) -> float | None:
    """How many of these tiles ask their pairs for membership: None where every tile lies in a candidate."""
    if select.q_block % size[0] == 0 and select.kv_block % size[1] == 0:
        return None
    # Of keys around a candidate none is one, whoever agrees on it.
    return met.tiles if size[1] > select.kv_block else met.tiles - met.agreed


class Stepped(NamedTuple):
    """The ``size`` of tile to take, and how many times the pairs of the default one it visits; if that is
    the default itself, of the ``other`` size that visits fewest."""

    size: Size
    pairs: float
    other: Size | None = None


def best_stepped(
    select: Selection, grid: Grid, heads: tuple[int, int], default: Size, per: int
) -> Stepped:
    """The tile that is predicted to take plain torch the least time on CPU: ``default``, or a smaller one
    that saves what can be told apart. A query takes ``per`` of its rows."""
    lists = grid.batch * select.heads
    every = itertools.product(
        _smaller(default[0], select.q_block * per, heights(per)),
        _smaller(default[1], select.kv_block, heights(1)),
    )
    sizes = [
        (rows, keys)
        for rows, keys in every
        if math.prod(grid.shape(rows // per, keys)) * lists <= _MOST_LISTED
        and (rows, keys) != default
    ]
    some = Selection.of_sets(
        select.indices[:1, :: ceil_div(select.heads, _FEW_LISTS)],
        kv_len=select.kv_len, q_len=select.q_len, kv_block=select.kv_block, q_block=select.q_block,
    )  # fmt: skip
    in_queries = [(rows // per, keys) for rows, keys in (default, *sizes)]
    whole, *met = tiles_met(some, grid, heads, in_queries, _FEW_ENTRIES)
    if not sizes or not whole.tiles:
        return Stepped(default, 1.0)

    def pairs(m: Met, size: Size) -> float:
        return m.tiles * math.prod(size) / (whole.tiles * math.prod(default))

    least, size, m = min((stepped(m, size), size, m) for m, size in zip(met, sizes, strict=True))
    if least < _ENOUGH * stepped(whole, default):
        return Stepped(size, pairs(m, size))
    fewest, other = min((pairs(m, size), size) for m, size in zip(met, sizes, strict=True))
    return Stepped(default, fewest, other) if fewest < 1 else Stepped(default, 1.0)


def _smaller(most: int, block: int, there: Sequence[int]) -> list[int]:
    """Of sizes that are ``there`` up to the ``most``: the one of a block, one between, and the most."""
    of_block = next((n for n in there if n >= block), most)
    between = next((n for n in there if n >= most // 2), most)
    return sorted({of_block, between, most})


def stepped(met: Met, size: Size) -> float:
    """The time of tiles in plain torch on CPU, in that of a pair."""
    return met.tiles * (math.prod(size) + _EDGE * sum(size) + _TILE) + met.row * _STEP


def heights(group: int) -> list[int]:
    """Heights that hold whole queries of ``group`` rows and suit tensor cores: up to 128, or the least.

    >>> heights(16), heights(3), heights(64)
    ([16, 32, 64, 128], [48, 96], [64, 128])
    """
    least = common_multiple(16, group)
    found = [least]
    while found[-1] * 2 <= 128:
        found.append(found[-1] * 2)
    return found


def _touched(select: Selection, grid: Grid, query: Tensor, keys: int) -> Tensor:
    """bool ``[B, H, n, C]``: the columns of ``keys`` that each query touches; one past the end, none."""
    lengths = (grid.q_len, grid.kv_len)
    geometry = Geometry(*lengths, select.q_block, select.kv_block, 1, keys)
    columns = geometry.tiles[1]
    row = query.clamp(max=grid.q_len - 1) // select.q_block
    chosen = select.indices[:, :, row].to(torch.int64)
    used = (chosen >= 0) & (query < grid.q_len)[:, None]
    first = chosen * select.kv_block // keys
    last = (((chosen + 1) * select.kv_block).clamp(max=grid.kv_len) - 1) // keys
    # One column past the last: unused slots write there.
    touched = torch.zeros((*chosen.shape[:3], columns + 1), dtype=torch.bool, device=chosen.device)
    for step in range(geometry.tiles_per_candidate):
        inside = used & (first + step <= last)
        touched.scatter_(-1, torch.where(inside, first + step, columns), True)
    return touched[..., :columns]
