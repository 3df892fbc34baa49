"""The ways to run a call on CUDA and what each would take: the quickest of those that are exact is chosen.

A way is a kernel, a laying of heads and a tile. What each has to visit is counted on the device, from the
candidates, when a plan is made; what that takes is reckoned by the cost model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.backends import Call, decode, dense, flash, gather, member
from flexsparse.choice import (
    BACKENDS,
    DEFAULT_TILE,
    FINE_KEYS,
    UNTILED,
    BackendName,
    Pack,
    fine_keys,
    holds_several,
    laid_alike,
    viewable,
)
from flexsparse.cost import Counts, Gathered, Job, Pairs, Read, Tiles, predicted_ms
from flexsparse.device import Ceilings, ceilings
from flexsparse.grid import Grid
from flexsparse.layout import Layout
from flexsparse.occupancy import on_device_only
from flexsparse.overlap import MOST_TILES, asked, heights, tiles_met
from flexsparse.selection import Selection
from flexsparse.shapes import ceil_div

Size = tuple[int, int]
# Rows are not laid anew for less than that part of the time without.
_ENOUGH = 0.85
# How often candidates are moved while rows are sorted by them.
_HASHING = 6


class Way(NamedTuple):
    """``ms`` predicted for one run, layout apart, of a backend over tiles of (rows, keys); it is what
    ``job`` would take."""

    ms: float
    backend: BackendName
    pack: Pack
    tile: Size
    job: Job | None = None
    ordered: bool = False

    def __str__(self) -> str:
        where = "" if self.backend in UNTILED else f" over {self.tile[0]}x{self.tile[1]}"
        packed = ", heads packed" if self.pack == "pack" else ""
        alike = ", alike rows together" if self.ordered else ""
        return f"{self.backend}{where}{packed}{alike}: {self.ms:.3g} ms"


def weighs(call: Call) -> bool:
    """Whether there is something to weigh: on CUDA, where the host may look, and not for few queries."""
    on_device = call.device.type == "cuda" and not on_device_only(call.device)
    return on_device and decode.refuses(call) is not None


def ways(
    qkv: tuple[Tensor, Tensor, Tensor],
    call: Call,
    select: Selection | None,
    grid: Grid,
    base: Pack,
    *,
    pack: Pack | None = None,
    tile: Size | None = None,
    cluster: bool | None = None,
) -> list[Way]:
    """Every way that can run the call, quickest first; none where nothing is to be weighed.

    ``base`` is how heads are laid where they are not packed; ``pack``, ``tile`` and ``cluster`` leave only
    those asked for. Reads the device once or twice.
    """
    if select is None:
        found = [] if pack == "pack" else _all_pairs(call, grid, pack or base, tile)
    else:
        found = _selected(qkv, call, select, grid, base, pack, tile, ordered=False)
        # What the rule makes of the tiles of single rows stands on the device.
        codes = select.shape[:3].numel() * ceil_div(grid.kv_len, FINE_KEYS)
        if cluster or (cluster is None and codes <= MOST_TILES):
            alike = laid_alike(select)
            laid = _selected(qkv, call, alike, grid, base, pack, tile, ordered=True)
            as_they_are = min((way.ms for way in found), default=math.inf)
            enough = [way for way in laid if cluster or way.ms < _ENOUGH * as_they_are]
            found = enough if cluster else found + enough
    if flash.compiles_long(call):
        found = [way for way in found if way.backend != "flash"]
    return _exact(found, call)


def foreseen(call: Call, layout: Layout, backend: str, pack: Pack) -> list[Way]:
    """What it takes to run over a finished layout where nothing was weighed: by ``backend``, and by what
    else takes its tiles as they are. Reads the device once, for few queries never.
    """
    box = ceilings(call.device, call.dtype)
    if backend == "decode":
        keys = _listed_at_most(call, layout)
        return [_way(call, Read(keys), "decode", pack, layout.block_size, box)]
    if backend not in ("flash", "flex"):
        return []
    address, lists = call.program.address, layout.kv_num_blocks + layout.full_kv_num_blocks
    heads, kv_heads = address.kernel_heads
    whole = address.kernel_batch(layout.grid.batch) * heads / lists.shape[:2].numel()
    column = lists.new_zeros(())
    if call.grads and layout.columns is not None:
        some, _, full, _ = layout.columns[:4]
        column = (some + full).amax() * (heads // kv_heads)
    some = layout.kv_num_blocks.sum()
    number, row, longest, cut = torch.stack([lists.sum(), lists.amax(), column, some]).tolist()
    tiles = Tiles(number * whole, *layout.block_size, row=row, column=longest, partial=cut * whole)
    found = _tiled(call, tiles, pack, box, 0.0)
    return _exact(found, call)


def _exact(found: list[Way], call: Call) -> list[Way]:
    """Those whose backend runs the call, quickest first."""
    runs = {name for name, backend in BACKENDS.items() if backend.refuses(call) is None}
    return sorted((way for way in found if way.backend in runs), key=lambda way: way[:4])


def _listed_at_most(call: Call, layout: Layout) -> float:
    """Keys in the tiles that lists have room for, over batch and KV heads."""
    address, grid, select = call.program.address, layout.grid, layout.select
    keys = float(grid.kv_len)
    if select is not None:
        # A row of candidates is listed for all queries of its tile.
        keys = min(keys, select.shape[3] * select.kv_block * float(select.rows))
    return grid.batch * address.kv_heads * keys


def _way(
    call: Call, counts: Counts, backend: BackendName, pack: Pack, tile: Size, box: Ceilings,
    copied: float = 0.0,
) -> Way:  # fmt: skip
    dims = (call.head_dim, call.v_head_dim)
    job = Job(backend, counts, dims, call.dtype.itemsize, call.grads, copied)
    return Way(predicted_ms(job, box), backend, pack, tile, job)


def _all_pairs(call: Call, grid: Grid, base: Pack, tile: Size | None) -> list[Way]:
    """All pairs, or all that are not of the future: dense kernels do that as well."""
    causal = dense.known(call.program, grid, selected=False)
    if causal is None or call.lse or call.scored:
        return []
    box = ceilings(call.device, call.dtype)
    pairs = grid.batch * call.program.address.heads * grid.q_len * float(grid.kv_len)
    pairs = pairs / 2 if causal else pairs
    rows, keys = tile or DEFAULT_TILE
    over = 1 + rows / grid.q_len if causal else 1.0
    cut = _borders(grid, rows, keys) * grid.batch * call.program.address.heads if causal else 0.0
    tiles = Tiles(pairs * over / (rows * keys), rows, keys, partial=cut)
    return [
        _way(call, Pairs(pairs), "dense", base, (rows, keys), box),
        *_tiled(call, tiles, base, box, 0.0),
    ]


def _selected(
    qkv: tuple[Tensor, Tensor, Tensor],
    call: Call,
    select: Selection,
    grid: Grid,
    base: Pack,
    pack: Pack | None,
    tile: Size | None,
    *,
    ordered: bool,
) -> list[Way]:
    address = call.program.address
    group, heads = address.group, (address.heads, address.kv_heads)
    laid = _laid(qkv, select, grid, base, pack, tile)
    if ordered:
        per_query = {"pack": group}
        laid = [
            (way, size)
            for way, size in laid
            if holds_several(size[0] // per_query.get(way, 1), select.q_block)
        ]
    if not laid:
        return []
    sizes = [(rows // group if way == "pack" else rows, keys) for way, (rows, keys) in laid]
    met = tiles_met(select, grid, heads, sizes)
    box = ceilings(call.device, call.dtype)
    found: list[Way] = []
    for (way, (rows, keys)), (queries, _), at in zip(laid, sizes, met, strict=True):
        # A tile of single heads is visited by each of a group.
        each = 1 if way == "pack" else group
        asks = asked(select, at, (queries, keys))
        asks = None if asks is None else asks * each
        cut = 0.0
        if call.program.rule is not None:
            cut = _borders(grid, queries, keys) * grid.batch * address.kv_heads * each
        own_rows = way != "pack" and not ordered
        spread = asks is not None and own_rows and member.serves(call, (rows, keys))
        tiles = Tiles(
            at.tiles * each,
            rows,
            keys,
            asks,
            select.kv_block,
            at.row,
            at.column * each,
            cut,
            spread,
        )
        # q is laid anew, and out laid back.
        copied = (qkv[0].numel() * (1 + call.v_head_dim / call.head_dim)) * call.dtype.itemsize
        moved = copied * ((way == "pack") + ordered)
        if not ordered:
            found += _tiled(call, tiles, way, box, moved)
            continue
        # The rows are sorted by what their candidates hash to.
        moved += 4.0 * select.shape.numel() * _HASHING
        made = _tiled(call, tiles, way, box, moved)
        found += [one._replace(ordered=True) for one in made if one.backend == "flex"]
    if pack is None and not ordered and gather.fuses(call):
        blocks = int((select.indices >= 0).sum()) * select.q_block
        lists = select.shape[:2].numel()
        own = select.heads == address.heads or call.program.uses_head
        most = grid.batch * (address.heads if own else address.kv_heads)
        listed = blocks * min(select.kv_block, grid.kv_len) * most / lists
        heads_a_list = 1 if own else group
        whole = gather.by_blocks(call, select.q_block, select.kv_block, heads_a_list)
        keys_read = Gathered(listed, select.kv_block if whole else 1, heads_a_list)
        found.append(_way(call, keys_read, "gather", base, tile or DEFAULT_TILE, box))
    return found


def _borders(grid: Grid, queries: int, keys: int) -> float:
    """Tiles of a list that a rule is likely to cut: those its queries stand in."""
    return float(ceil_div(grid.q_len, queries) * ceil_div(queries, keys))


def _laid(
    qkv: tuple[Tensor, Tensor, Tensor],
    select: Selection,
    grid: Grid,
    base: Pack,
    pack: Pack | None,
    tile: Size | None,
) -> list[tuple[Pack, Size]]:
    """The layings of heads, and tiles, that are worth counting."""
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    found: list[tuple[Pack, Size]] = []
    widths = {fine_keys(select), DEFAULT_TILE[1]}
    if pack != "pack":
        fits = [tile] if tile is not None else _heights_apart(select, grid, widths)
        found += [(pack or base, size) for size in fits]
    packs = (
        group > 1 and select.heads in (1, k.shape[1]) and viewable(k, v) and pack in (None, "pack")
    )
    if not packs:
        return found
    if tile is not None:
        return [*found, ("pack", tile)] if tile[0] % group == 0 else found
    for keys in widths:
        for rows in heights(group):
            tiles = grid.shape(rows // group, keys)
            if tiles[0] * tiles[1] <= MOST_TILES:
                found.append(("pack", (rows, keys)))
    return found


def _heights_apart(select: Selection, grid: Grid, widths: set[int]) -> list[Size]:
    """Tiles of single heads: no shorter than a row of candidates, and than the default where they differ."""
    least = min(DEFAULT_TILE[0], select.q_block if select.rows > 1 else DEFAULT_TILE[0])
    sizes = [(rows, keys) for rows in heights(1) if rows >= least for keys in widths]
    fit = [size for size in sizes if math.prod(grid.shape(*size)) <= MOST_TILES]
    return fit or [DEFAULT_TILE]


def _tiled(call: Call, tiles: Tiles, pack: Pack, box: Ceilings, copied: float) -> list[Way]:
    """By each kernel that visits tiles and takes those of this size as they are."""
    found: list[Way] = []
    names: tuple[BackendName, ...] = ("flash", "flex")
    for name in names:
        size = (tiles.rows, tiles.keys)
        if BACKENDS[name].tile_for(size, call) == size:
            found.append(_way(call, tiles, name, pack, size, box, copied))
    return found
