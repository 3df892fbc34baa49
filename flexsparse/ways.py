"""The ways to run a call on CUDA and what each would take: the quickest of those that are exact is chosen.

A way is a kernel, a laying of heads and a tile. What each has to visit is counted on the device, from the
candidates, when a plan is made; what that takes is reckoned by the cost model.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexsparse.backends import Call, decode, dense, flash, flex, gather
from flexsparse.choice import (
    BACKENDS,
    DEFAULT_TILE,
    UNTILED,
    BackendName,
    Pack,
    fine_keys,
    viewable,
)
from flexsparse.cost import Tiles, dense_ms, gathered_ms, moved_ms, tiled_ms
from flexsparse.device import Ceilings, ceilings
from flexsparse.grid import Grid
from flexsparse.occupancy import on_device_only
from flexsparse.overlap import MOST_TILES, heights, tiles_met
from flexsparse.selection import Selection

Size = tuple[int, int]


class Way(NamedTuple):
    """``ms`` predicted for one run, layout apart, of a backend over tiles of (rows, keys)."""

    ms: float
    backend: BackendName
    pack: Pack
    tile: Size

    def __str__(self) -> str:
        where = "" if self.backend in UNTILED else f" over {self.tile[0]}x{self.tile[1]}"
        packed = ", heads packed" if self.pack == "pack" else ""
        return f"{self.backend}{where}{packed}: {self.ms:.3g} ms"


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
) -> list[Way]:
    """Every way that can run the call, quickest first; none where nothing is to be weighed.

    ``base`` is how heads are laid where they are not packed; ``pack`` and ``tile`` leave only those asked
    for. Reads the device once or twice.
    """
    if select is None:
        found = [] if pack == "pack" else _all_pairs(call, grid, pack or base, tile)
    else:
        found = _selected(qkv, call, select, grid, base, pack, tile)
    runs = {name for name, backend in BACKENDS.items() if backend.refuses(call) is None}
    return sorted(way for way in found if way.backend in runs)


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
    tiles = Tiles(pairs * over / (rows * keys), rows, keys)
    return [
        Way(dense_ms(pairs, _dims(call), box, grads=call.grads), "dense", base, (rows, keys)),
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
) -> list[Way]:
    address = call.program.address
    group, heads = address.group, (address.heads, address.kv_heads)
    laid = _laid(qkv, select, grid, base, pack, tile)
    sizes = [(rows // group if way == "pack" else rows, keys) for way, (rows, keys) in laid]
    met = tiles_met(select, grid, heads, sizes)
    box = ceilings(call.device, call.dtype)
    found: list[Way] = []
    for (way, (rows, keys)), (queries, _), at in zip(laid, sizes, met, strict=True):
        # A tile of single heads is visited by each of a group.
        each = 1 if way == "pack" else group
        whole = select.q_block % queries == 0 and select.kv_block % keys == 0
        # Of keys around a candidate none is one, whoever agrees on it.
        differ = at.tiles if keys > select.kv_block else at.tiles - at.agreed
        asked = None if whole else differ * each
        tiles = Tiles(at.tiles * each, rows, keys, asked, select.kv_block, at.row, at.column * each)
        # q is laid anew, and out laid back.
        copied = (qkv[0].numel() * (1 + call.v_head_dim / call.head_dim)) * call.dtype.itemsize
        found += _tiled(call, tiles, way, box, copied if way == "pack" else 0.0)
    if pack is None and gather.fuses(call):
        blocks = int((select.indices >= 0).sum()) * select.q_block
        lists = select.indices.shape[:2].numel()
        own = select.heads == address.heads or call.program.uses_head
        most = grid.batch * (address.heads if own else address.kv_heads)
        listed = blocks * min(select.kv_block, grid.kv_len) * most / lists
        heads_a_list = 1 if own else group
        whole = gather.by_blocks(call, select.q_block, select.kv_block, heads_a_list)
        block = select.kv_block if whole else 1
        ms = gathered_ms(
            listed, block, heads_a_list, _dims(call), call.dtype.itemsize, box, grads=call.grads
        )
        found.append(Way(ms, "gather", base, tile or DEFAULT_TILE))
    return found


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
    if pack != "pack":
        found.append((pack or base, tile or DEFAULT_TILE))
    packs = (
        group > 1 and select.heads in (1, k.shape[1]) and viewable(k, v) and pack in (None, "pack")
    )
    if not packs:
        return found
    if tile is not None:
        return [*found, ("pack", tile)] if tile[0] % group == 0 else found
    for keys in {fine_keys(select), DEFAULT_TILE[1]}:
        for rows in heights(group):
            tiles = grid.shape(rows // group, keys)
            if tiles[0] * tiles[1] <= MOST_TILES:
                found.append(("pack", (rows, keys)))
    return found


def _tiled(call: Call, tiles: Tiles, pack: Pack, box: Ceilings, copied: float) -> list[Way]:
    """By each kernel that visits tiles and takes those of this size as they are."""
    found = []
    for backend in (flash, flex):
        size = (tiles.rows, tiles.keys)
        if backend.tile_for(size, call) != size:
            continue
        ms = tiled_ms(tiles, backend.name, _dims(call), box, grads=call.grads)
        ms += moved_ms(copied * (1 + call.grads), box) if copied else 0.0
        found.append(Way(ms, backend.name, pack, size))
    return found


def _dims(call: Call) -> Size:
    return call.head_dim, call.v_head_dim
