"""How a call runs: its address, its backend, its tile, each with the reason."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flexsparse.address import (
    FoldedHeads,
    Identity,
    PackedHeads,
    Taken,
    folds_without_copy,
    taken,
)
from flexsparse.arguments import SMALLEST_TILE, tile_size
from flexsparse.backends import Backend, Call, decode, dense, flash, flex, gather, tiles
from flexsparse.errors import ArgumentError, BackendError, LayoutError
from flexsparse.grid import Grid
from flexsparse.occupancy import on_device_only
from flexsparse.ordering import alike, in_order
from flexsparse.overlap import (
    LEAST_BLOCK,
    LEAST_PAIRS,
    MOST_TILES,
    best_rows,
    best_stepped,
    heights,
)
from flexsparse.selection import Selection
from flexsparse.shapes import ceil_div, common_multiple, next_power_of_two

BackendName = Literal["auto", "measured", "decode", "flash", "flex", "tiles", "gather", "dense"]
Pack = Literal["identity", "fold", "pack"]
BACKENDS: dict[str, Backend] = {
    "decode": decode, "flash": flash, "flex": flex, "tiles": tiles, "gather": gather, "dense": dense
}  # fmt: skip
ADDRESSES: dict[Pack, type[Identity]] = {
    "identity": Identity,
    "fold": FoldedHeads,
    "pack": PackedHeads,
}
# These visit no tiles, so nobody reads their lists by column.
UNTILED = ("gather", "dense")
# These ask for membership row by row, wherever a row stands.
_ORDERING = frozenset({"tiles", "flex"})
_UNORDERED = {"gather": "k and v", "dense": "q, k and v", "flash": "q"}
DEFAULT_TILE = (128, 128)
# Keys of a tile where candidates are smaller than the default: hardly slower, and half as much wasted.
FINE_KEYS = 64


def choose_address(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    select: Selection | None,
    pack: str | None,
    backend: str,
    why: list[str],
) -> Identity:
    """How heads are laid; beside each other only for a ``backend`` that visits tiles."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if pack not in (None, *ADDRESSES):
        raise ArgumentError(f"pack must be None, 'identity', 'fold' or 'pack', got {pack!r}")
    if pack == "pack":
        return _packed(q, k, v, select, why)
    if pack == "fold":
        if not viewable(q, k, v):
            raise LayoutError(
                "pack='fold' needs q, k and v whose heads fold into the batch without a copy: make "
                "them contiguous as [B, H, S, D], or leave pack out"
            )
        why.append("KV heads are folded as asked")
        return FoldedHeads(heads, kv_heads)
    if pack == "identity":
        why.append("heads are laid as they are, as asked")
        return Identity(heads, kv_heads)
    if backend not in UNTILED and _packs(q, k, v, select):
        why.append(
            f"{heads // kv_heads} heads beside each query: they share its candidates, and a tile holds "
            "fewer queries that select for themselves"
        )
        return PackedHeads(heads, kv_heads)
    laid = unpacked(q, k, v, select)
    if laid == "fold":
        why.append("one list per KV head: folded, so that its query heads share it")
    elif _a_list_per_kv_head(q, k, select):
        why.append("a list per KV head is repeated for its query heads: folding would copy tensors")
    return ADDRESSES[laid](heads, kv_heads)


def pack_of(address: Identity) -> Pack:
    """How an address lays heads."""
    kind = type(address.inner if isinstance(address, Taken) else address)
    return next(pack for pack, laid in ADDRESSES.items() if kind is laid)


def unpacked(q: Tensor, k: Tensor, v: Tensor, select: Selection | None) -> Pack:
    """How heads are laid where those of a group do not stand beside each other."""
    return "fold" if _a_list_per_kv_head(q, k, select) and viewable(q, k, v) else "identity"


def _a_list_per_kv_head(q: Tensor, k: Tensor, select: Selection | None) -> bool:
    return select is not None and select.heads == k.shape[1] and 1 < k.shape[1] < q.shape[1]


def viewable(*tensors: Tensor) -> bool:
    """Whether the heads of all fold into the batch without a copy."""
    return all(folds_without_copy(x) for x in tensors)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, select: Selection | None, why: list[str]
) -> PackedHeads:
    """The packing that was asked for, if these tensors and lists take it."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if not viewable(k, v):
        raise LayoutError(
            "pack='pack' needs k and v whose heads fold into the batch without a copy: make them "
            "contiguous as [B, H, S, D], or leave pack out"
        )
    if select is not None and select.heads not in (1, kv_heads):
        raise LayoutError(
            f"pack='pack' puts the {heads // kv_heads} query heads of a KV head into one tile, but "
            "each has a list of its own here: give a list per KV head, or leave pack out"
        )
    why.append("query heads stand beside their queries as asked")
    return PackedHeads(heads, kv_heads)


def _packs(q: Tensor, k: Tensor, v: Tensor, select: Selection | None) -> bool:
    """Whether rows of candidates are so short that a tile of single heads holds several of them."""
    heads, kv_heads, rows = q.shape[1], k.shape[1], DEFAULT_TILE[0]
    group = heads // kv_heads
    return (
        select is not None
        and select.heads in (1, kv_heads)
        and group > 1
        and rows % group == 0
        and select.q_block * group < rows <= q.shape[2]
        and ceil_div(q.shape[2], rows // group) * ceil_div(k.shape[2], FINE_KEYS) <= MOST_TILES
        and viewable(k, v)
    )


def choose_backend(name: str, call: Call, why: list[str], *, tiles_on_cpu: bool) -> Backend:
    """The backend of that ``name``, or the one that suits the call; ``tiles_on_cpu``: there it visits tiles
    even for few queries."""
    if name == "measured":
        if call.device.type != "cuda":
            raise BackendError(
                f"backend 'measured' times kernels on CUDA, not on {call.device}: use 'auto'"
            )
        why.append("there is one way to run this: nothing was timed")
    elif name != "auto":
        if not isinstance(name, str) or name not in BACKENDS:
            raise BackendError(
                f"backend must be one of auto, measured, {', '.join(BACKENDS)}, got {name!r}"
            )
        backend = BACKENDS[name]
        if (refusal := backend.refuses(call)) is not None:
            raise BackendError(f"backend {name!r} cannot run this: {refusal}; use backend='tiles'")
        why += [f"{name} was asked for", *remarks(backend, call)]
        return backend
    on_cpu = call.device.type == "cpu"
    if decode.refuses(call) is None and not (on_cpu and tiles_on_cpu):
        why.append(
            "decode: few queries, whose lists of keys are "
            + ("walked by all heads in step" if on_cpu else "shared out over the whole device")
        )
        return decode
    if on_cpu:
        why.append(
            "tiles on CPU: FlexAttention there compiles anew for each length and has neither backward "
            "nor lse (backend='flex' takes it, forward only)"
        )
        return tiles
    refusal = flash.refuses(call) or flash.compiles_long(call)
    if refusal is None and call.q_len < flash.TILE:
        refusal = f"{call.q_len} queries would leave most of its {flash.TILE} rows idle"
    if refusal is None:
        why.append("flash: FlashAttention-4 under FlexAttention, the fastest kernel on Hopper")
        why += remarks(flash, call)
        return flash
    why.append(f"not flash: {refusal}")
    if (refusal := flex.refuses(call)) is not None:
        why.append(f"tiles: {refusal}")
        return tiles
    why.append("flex: one fused kernel, forward and backward")
    return flex


def refuses_order(
    select: Selection | None, grid: Grid, fallback: bool, empty: str, sanitize: bool
) -> str | None:
    """Why rows cannot be laid beside those that select alike, or None."""
    if select is None or select.rows == 1:
        return "it lays rows of candidates beside each other, and there are not several"
    if fallback or empty != "zero" or sanitize:
        return "a fallback, empty='error' and sanitize ask single queries, which it moves"
    return None


def laid_alike(select: Selection) -> Selection:
    """The selection with alike rows beside each other."""
    return in_order(select, alike(select))


def holds_several(rows: int, q_block: int) -> bool:
    """Whether a tile of so many queries holds several whole rows of candidates."""
    return rows > q_block and rows % q_block == 0


def holding_several(
    size: tuple[int, int],
    address: Identity,
    select: Selection | None,
    backend: Backend,
    call: Call,
    why: list[str],
) -> tuple[int, int]:
    """``size``, or one so tall that several whole rows of candidates stand in a tile."""
    assert select is not None
    one = select.q_block * address.rows_per_query
    if holds_several(size[0], one):
        return size
    tall = backend.tile_for((max(2, ceil_div(size[0], one)) * one, size[1]), call)
    why.append(f"tiles of {tall[0]}x{tall[1]}: rows of candidates that select alike share one")
    return tall


def ordered(
    address: Identity,
    select: Selection | None,
    tile: tuple[int, int],
    backend: Backend,
    why: list[str],
) -> Taken:
    """``address`` with rows in the order of what they select, if tiles and kernel take it."""
    assert select is not None
    queries = tile[0] // address.rows_per_query
    if not holds_several(queries, select.q_block):
        raise LayoutError(
            f"cluster=True lays several rows of {select.q_block} queries into a tile, and tiles of "
            f"{tile[0]}x{tile[1]} hold {queries} queries: give tile= of twice "
            f"{select.q_block * address.rows_per_query} rows or a higher multiple, or leave cluster out"
        )
    if backend.name not in _ORDERING:
        raise BackendError(
            f"backend {backend.name!r} takes rows only as they are: use backend='flex' or 'tiles', or "
            "leave cluster out"
        )
    why.append(f"{queries // select.q_block} rows that select alike stand in a tile")
    return taken(address, "order")


def fine_keys(select: Selection) -> int:
    """Keys of a tile: as many as by default where candidates fill them, else few."""
    return DEFAULT_TILE[1] if select.kv_block % DEFAULT_TILE[1] == 0 else FINE_KEYS


def remarks(backend: Backend, call: Call) -> list[str]:
    """What is to be known of a backend beside its speed."""
    if backend.name not in _UNORDERED or not call.grads or call.device.type != "cuda":
        return []
    return [
        f"gradients of {_UNORDERED[backend.name]} are summed by atomics: their last bits may differ "
        "from run to run"
    ]


def choose_tile(
    tile: int | tuple[int, int] | None,
    grid: Grid,
    address: Identity,
    select: Selection | None,
    backend: Backend,
    call: Call,
    why: list[str],
) -> tuple[int, int]:
    if tile is None and (backend is decode or (backend is flex and flex.decodes(call))):
        return _decoding_tile(backend, call, why, select)
    if tile is not None:
        why += asked_for(tile_size(tile), backend)
    if backend.name in UNTILED:
        # Its layout has tiles, which nobody visits.
        why = []
    unit = backend.tile_for((1, 1), call)
    if tile is not None:
        asked = tile_size(tile)
    elif backend is tiles and select is not None and _in_step(call, grid, address, select):
        asked = _stepped_tile(grid, address, select, why)
    elif isinstance(address, PackedHeads) and select is not None and unit[0] < DEFAULT_TILE[0]:
        asked = _packed_tile(grid, address, select, call, why)
    else:
        asked = DEFAULT_TILE
    lengths = (grid.q_len * address.rows_per_query, grid.kv_len)
    # What is past the lengths would be evaluated, and held, for nothing.
    largest = [max(d, next_power_of_two(n)) for d, n in zip(DEFAULT_TILE, lengths, strict=True)]
    wanted = min(asked[0], largest[0]), min(asked[1], largest[1])
    if wanted != asked:
        why.append(
            f"tiles of {asked[0]}x{asked[1]} are cut to {wanted[0]}x{wanted[1]}: the lengths are no longer"
        )
    given = backend.tile_for(wanted, call)
    if given[0] % address.rows_per_query:
        rows = common_multiple(unit[0], address.rows_per_query)
        given = ceil_div(given[0], rows) * rows, given[1]
    if given != wanted:
        why.append(
            f"tiles of {wanted[0]}x{wanted[1]} run as {given[0]}x{given[1]}, exact inside: what "
            f"{backend.name} computes at once{' in its backward' if call.grads else ''}"
        )
    return given


def asked_for(tile: tuple[int, int], backend: Backend) -> list[str]:
    """What is to be said of a tile that was asked for."""
    said = f"a tile of {tile[0]}x{tile[1]} was asked for"
    if backend.name in UNTILED:
        return [f"{said}, but {backend.name} visits none"]
    if tile[0] % SMALLEST_TILE or tile[1] % SMALLEST_TILE:
        said += f"; no multiple of {SMALLEST_TILE}, which is what tensor cores take at once"
    return [said]


def _decoding_tile(
    backend: Backend, call: Call, why: list[str], select: Selection | None
) -> tuple[int, int]:
    """As few rows as a kernel has, and as many keys as a candidate: no page is read for its neighbour."""
    keys = decode.KEYS if select is None else select.kv_block
    given = decode.tile_for((16, keys), call)
    if backend is flex:
        # torch's decoding kernel counts all query heads of a KV head as rows of its tile.
        given = max(16, next_power_of_two(call.q_len * call.group)), given[1]
    blocks = "without a selection" if select is None else f"for blocks of {select.kv_block}"
    why.append(f"tiles of {given[0]}x{given[1]}: few queries, {blocks}")
    return given


def _packed_tile(
    grid: Grid, address: PackedHeads, select: Selection, call: Call, why: list[str]
) -> tuple[int, int]:
    """As tall as pays for what neighbouring queries share; as wide as candidates, where they are fine."""
    keys, group = fine_keys(select), address.group
    if on_device_only(call.device):
        rows = heights(group)[-1]
        why.append(f"tiles of {rows} rows: what neighbours share is not measured in a graph")
        return rows, keys
    rows, times = best_rows(select, grid, (address.heads, address.kv_heads), keys)
    queries = rows // group
    why.append(
        f"tiles of {rows} rows: {queries} neighbouring queries touch {times:.1f} times what one does"
        if queries > 1
        else f"tiles of {rows} rows, a query each: neighbours share too little"
    )
    return rows, keys


def _in_step(call: Call, grid: Grid, address: Identity, select: Selection) -> bool:
    """Whether plain torch on CPU runs it, and candidates may be looked at. Rows of several heads have a
    height also where that is not worth it."""
    if call.device.type != "cpu" or on_device_only(call.device):
        return False
    worth = _pairs(grid, address) >= LEAST_PAIRS and select.kv_block >= LEAST_BLOCK
    return worth or address.rows_per_query == 1


def _pairs(grid: Grid, address: Identity) -> int:
    return grid.batch * address.heads * grid.q_len * grid.kv_len


def _stepped_tile(
    grid: Grid, address: Identity, select: Selection, why: list[str]
) -> tuple[int, int]:
    """As small as pays for what candidates leave of larger tiles, in plain torch."""
    pairs = _pairs(grid, address)
    if pairs < LEAST_PAIRS:
        why.append(
            "tiles of {}x{}: {:,} pairs are too few to weigh smaller ones, which takes a look at the "
            "candidates, from {:,} on; tile= sets them".format(*DEFAULT_TILE, pairs, LEAST_PAIRS)
        )
        return DEFAULT_TILE
    if select.kv_block < LEAST_BLOCK:
        why.append(
            "tiles of {}x{}: smaller ones are weighed for blocks of {} keys and more alone".format(
                *DEFAULT_TILE, LEAST_BLOCK
            )
        )
        return DEFAULT_TILE
    default = heights(address.rows_per_query)[-1], DEFAULT_TILE[1]
    found = best_stepped(
        select, grid, (address.heads, address.kv_heads), default, address.rows_per_query
    )
    rows, keys = found.size
    if found.size == default:
        less = "no smaller ones would visit less"
        if found.other is not None:
            less = "{}x{} would visit {:.2f} times the pairs, in more steps or smaller ones".format(
                *found.other, found.pairs
            )
        why.append(f"tiles of {rows}x{keys}: {less}")
    else:
        why.append(
            f"tiles of {rows}x{keys}: they visit {found.pairs:.2f} times the pairs of "
            f"{default[0]}x{default[1]}"
        )
    return found.size
