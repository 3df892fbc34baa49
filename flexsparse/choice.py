"""How a call runs: its address, its backend, its tile, each with the reason."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flexsparse.address import FoldedHeads, Identity, folds_without_copy
from flexsparse.arguments import tile_size
from flexsparse.backends import Backend, Call, decode, dense, flash, flex, gather, tiles
from flexsparse.errors import ArgumentError, BackendError, LayoutError
from flexsparse.selection import Selection
from flexsparse.shapes import next_power_of_two

BackendName = Literal["auto", "decode", "flash", "flex", "tiles", "gather", "dense"]
Pack = Literal["identity", "fold"]
BACKENDS: dict[str, Backend] = {
    "decode": decode, "flash": flash, "flex": flex, "tiles": tiles, "gather": gather, "dense": dense
}  # fmt: skip
# These visit no tiles, so nobody reads their lists by column.
UNTILED = frozenset({"gather", "dense"})
_UNORDERED = {"gather": "k and v", "dense": "q, k and v", "flash": "q"}
_DEFAULT_TILE = (128, 128)


def choose_address(
    q: Tensor, k: Tensor, v: Tensor, select: Selection | None, pack: str | None, why: list[str]
) -> Identity:
    heads, kv_heads = q.shape[1], k.shape[1]
    if pack not in (None, "identity", "fold"):
        raise ArgumentError(f"pack must be None, 'identity' or 'fold', got {pack!r}")
    viewable = all(folds_without_copy(x) for x in (q, k, v))
    per_query = select is not None and select.heads == heads and heads != kv_heads
    if pack == "fold":
        if not viewable:
            raise LayoutError(
                "pack='fold' needs q, k and v whose heads fold into the batch without a copy: make "
                "them contiguous as [B, H, S, D], or leave pack out"
            )
        why.append("KV heads are folded as asked")
        return FoldedHeads(heads, kv_heads)
    per_kv = select is not None and select.heads == kv_heads and 1 < kv_heads < heads
    if pack == "identity" or not per_kv or per_query:
        return Identity(heads, kv_heads)
    if not viewable:
        why.append("a list per KV head is repeated for its query heads: folding would copy tensors")
        return Identity(heads, kv_heads)
    why.append("one list per KV head: folded, so that its query heads share it")
    return FoldedHeads(heads, kv_heads)


def choose_backend(name: str, call: Call, why: list[str]) -> Backend:
    if name != "auto":
        if not isinstance(name, str) or name not in BACKENDS:
            raise BackendError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {name!r}")
        backend = BACKENDS[name]
        if (refusal := backend.refuses(call)) is not None:
            raise BackendError(f"backend {name!r} cannot run this: {refusal}; use backend='tiles'")
        why.append(f"{name} was asked for")
        if name in _UNORDERED and call.grads and call.device.type == "cuda":
            why.append(
                f"gradients of {_UNORDERED[name]} are summed by atomics: their last bits may differ "
                "from run to run"
            )
        return backend
    if call.device.type == "cpu":
        why.append(
            "tiles on CPU: FlexAttention there compiles anew for each length and has neither backward "
            "nor lse (backend='flex' takes it, forward only)"
        )
        return tiles
    if decode.refuses(call) is None:
        why.append("decode: few queries, whose lists of keys are shared out over the whole device")
        return decode
    refusal = flash.refuses(call)
    if refusal is None and call.q_len < flash.TILE:
        refusal = f"{call.q_len} queries would leave most of its {flash.TILE} rows idle"
    if refusal is None:
        why.append("flash: FlashAttention-4 under FlexAttention, the fastest kernel on Hopper")
        return flash
    why.append(f"not flash: {refusal}")
    if (refusal := flex.refuses(call)) is not None:
        why.append(f"tiles: {refusal}")
        return tiles
    why.append("flex: one fused kernel, forward and backward")
    return flex


def choose_tile(
    tile: int | tuple[int, int] | None,
    lengths: tuple[int, int],
    backend: Backend,
    call: Call,
    why: list[str],
    select: Selection | None = None,
) -> tuple[int, int]:
    if tile is None and (backend is decode or (backend is flex and flex.decodes(call))):
        return _decoding_tile(backend, call, why, select)
    wanted = asked = _DEFAULT_TILE if tile is None else tile_size(tile)
    # What is past the lengths would be evaluated, and held, for nothing.
    largest = [max(d, next_power_of_two(n)) for d, n in zip(_DEFAULT_TILE, lengths, strict=True)]
    wanted = min(asked[0], largest[0]), min(asked[1], largest[1])
    if wanted != asked:
        why.append(
            f"tiles of {asked[0]}x{asked[1]} are cut to {wanted[0]}x{wanted[1]}: the lengths are no longer"
        )
    given = backend.tile_for(wanted, call)
    if given != wanted:
        why.append(
            f"tiles of {wanted[0]}x{wanted[1]} run as {given[0]}x{given[1]}, exact inside: what "
            f"{backend.name} computes at once{' in its backward' if call.grads else ''}"
        )
    return given


def _decoding_tile(
    backend: Backend, call: Call, why: list[str], select: Selection | None
) -> tuple[int, int]:
    """As few rows as a kernel has, and as many keys as a candidate: no page is read for its neighbour."""
    keys = decode.KEYS if select is None else select.kv_block
    # torch's decoding kernel counts all query heads of a KV head as rows of its tile.
    rows = call.q_len * call.group if backend is flex else call.q_len
    given = max(16, next_power_of_two(rows)), decode.tile_for((16, keys), call)[1]
    blocks = "without a selection" if select is None else f"for blocks of {select.kv_block}"
    why.append(f"tiles of {given[0]}x{given[1]}: few queries, {blocks}")
    return given
