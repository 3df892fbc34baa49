"""Compiled FlexAttention: one fused kernel for each kind of call.

torch's FlexAttention is only ever entered compiled and whole: eager it ignores block lists, and after
a failed or over-specialised compile it silently becomes eager. So arguments are judged before, and
each kind of call has a compiled function of its own that never needs to specialise again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsparse.backends import Call, Work, member
from flexsparse.backends.compiled import Kernel, entered
from flexsparse.backends.routes import arguments, kernel_of, remember
from flexsparse.layout import Layout, as_block_mask, widened
from flexsparse.program import MaskProgram, ScoreProgram
from flexsparse.rules import MaskMod
from flexsparse.shapes import next_power_of_two

name = "flex"

# The tiles of torch's own backward on 16-bit inputs: lists must be whole multiples of them.
TRAINING_TILE = 128
# Query rows that torch's decoding kernel can hold for one KV head.
DECODE_ROWS = 128
# Keys that it takes in one step, and bytes of them with which four steps fit into shared memory.
_DECODE_KEYS = 64
_DECODE_BYTES = 2**15
# Of tiles that are no multiples of torch's own, by the rows of a piece: its keys, stages and warps. Measured on
# Hopper over blocks of 64 keys with head dims of 128, against some twenty others; torch's three stages of four
# warps took 1.3 to 1.4 times as long.
_SHORT = {16: (32, 3, 1), 32: (32, 2, 1), 64: (64, 2, 4)}
# Where each pair reads a table: pieces so small that a word a pair leaves room for their stages. Measured
# on Hopper with membership of single keys, against eleven others.
_READING = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "fwd_num_warps": 4,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 3, "bwd_num_warps": 4,
}  # fmt: skip


def refuses(call: Call) -> str | None:
    """Why FlexAttention cannot run this call, or None."""
    if call.dtype == torch.float64:
        return "compiled FlexAttention has no fp64"
    if call.device.type == "cpu":
        if call.grads:
            return (
                "FlexAttention has no backward on CPU (call it under torch.no_grad(), or with detached "
                "tensors, where no gradients are wanted)"
            )
        if call.lse:
            return "FlexAttention gives no lse on CPU"
    if call.device.type == "cuda" and min(call.head_dim, call.v_head_dim) < 16:
        return f"FlexAttention needs head dims of at least 16 on CUDA, got {call.head_dim}"
    return None


def tile_for(tile: tuple[int, int], call: Call) -> tuple[int, int]:
    """The tile that FlexAttention's kernels can use, at least as large as the one wanted."""
    if call.device.type == "cpu":
        return tile
    # A multiple of 16 for tensor cores; with gradients, of what the backward is built from.
    unit = TRAINING_TILE if call.grads else 16
    return (math.ceil(tile[0] / unit) * unit, math.ceil(tile[1] / unit) * unit)


def decodes(call: Call) -> bool:
    """Whether queries are so few that torch's decoding kernel, which splits the keys, can take them."""
    few = call.q_len < DECODE_ROWS and decode_rows(call.q_len, call.group) <= DECODE_ROWS
    return call.device.type == "cuda" and not call.grads and few and _is_power(call.group)


def decode_rows(q_len: int, group: int) -> int:
    """Rows of its tile: all queries of a KV head."""
    return max(16, next_power_of_two(q_len * group))


def _is_power(n: int) -> bool:
    return n == next_power_of_two(n)


def _decoding(work: Work, speech: Speech) -> bool:
    """Whether this work goes to torch's decoding kernel: its heads share a list, its tile fits."""
    if speech is not PLAIN or not work.q.is_cuda or work.grads or work.score is not None:
        return False
    return decoded(work.layout, work.q.shape[2])


def decoded(layout: Layout, queries: int) -> bool:
    """The same of a layout, for calls on CUDA without gradients and score. ``queries`` are those of the
    launch: of pieces there are more than the layout has."""
    heads, kv_heads = layout.address.kernel_heads
    group = heads // kv_heads
    q_tile, kv_tile = layout.block_size
    rows = decode_rows(queries, group)
    return (
        queries < DECODE_ROWS
        and rows <= DECODE_ROWS
        and q_tile % rows == 0
        and _is_power(group)
        and (kv_tile % _DECODE_KEYS == 0 or kv_tile in (16, 32))
        and (group == 1 or layout.kv_indices.shape[1] == 1)
    )


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    if member.suits(work):
        return member.run(work)
    if (found := again(work, name)) is not None:
        return found
    gathers = work.layout.program.gathers(work.layout.block_size)
    gathers += work.score.score.gathers if work.score else 0
    if _decoding(work, PLAIN):
        return run_with(work, _decode_options(work, gathers))
    return run_with(work, kernel_options(work.layout, work.q, work.k, gathers))


class Speech(NamedTuple):
    """How mods are said to a code generator: the same programs in operations that it knows, and
    whether it reads a number only where an index points at it. And what its lse, as torch gives it, is
    to be multiplied by for a natural one."""

    mask: Callable[[MaskProgram], MaskProgram]
    score: Callable[[ScoreProgram], ScoreProgram]
    points: bool
    lse_unit: Callable[[], float]


PLAIN = Speech(lambda program: program, lambda score: score, points=False, lse_unit=lambda: 1.0)


def run_with(
    work: Work, options: dict[str, Any], speech: Speech = PLAIN
) -> tuple[Tensor, Tensor | None]:
    """The call through torch's FlexAttention, told ``options`` of its kernels."""
    layout = work.layout
    on_cpu = work.q.device.type == "cpu"
    call = q, k, v, lists, tables, learned = arguments(work)
    if on_cpu:
        # There torch asks for lists at full width.
        q, k, v = (x.detach() for x in (q, k, v))
        call = (q, k, v, widened(lists, layout.span), tables, learned)
    if torch.compiler.is_compiling():
        out, lse = _body(work, options, speech)(*call)
    else:
        out, lse = _enter(work, call, options, speech)
    if on_cpu and q.shape[2] == 1:
        out = _clear_unlisted(out, layout)
    return out, lse


def again(work: Work, by: str) -> tuple[Tensor, Tensor | None] | None:
    """What the kernel gives that has run such work before, if one has."""
    kernel = kernel_of(work, by)
    if kernel is None:
        return None
    found: tuple[Tensor, Tensor | None] = kernel(*arguments(work))
    return found


def _body(work: Work, options: dict[str, Any], speech: Speech) -> Kernel:
    """The function to compile. It closes over decisions only; every tensor is an argument."""
    program, scale, want_lse = speech.mask(work.layout.program), work.scale, work.lse
    score = None if work.score is None else speech.score(work.score)
    block_size = work.layout.block_size
    split, asks = _reading(work, speech), asks_pairs(work.layout)
    decoding, lse_unit = _decoding(work, speech), speech.lse_unit() if want_lse else 1.0
    pointed = [speech.points and t.ndim == 0 for t in work.layout.tables]

    def flex(
        q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], tables: list[Tensor],
        score_tables: list[Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        lengths = (q.shape[2], k.shape[2])
        keywords: dict[str, Any] = {
            "score_mod": None if score is None else _score_mod(score, score_tables, split),
            "block_mask": as_block_mask(
                partial_only(lists, asks) if decoding else lists,
                lengths,
                block_size,
                _mask_mod(program, tables, pointed, block_size),
            ),
            "scale": scale,
            "enable_gqa": q.shape[1] != k.shape[1],
            "kernel_options": options,
        }
        if not want_lse:
            return flex_attention(q, k, v, **keywords), None
        out, aux = flex_attention(q, k, v, **keywords, return_aux=AuxRequest(lse=True))
        return out, aux.lse if lse_unit == 1 else aux.lse * lse_unit

    return flex


def asks_pairs(layout: Layout) -> bool:
    """Whether any tile of such a layout can be partial."""
    return layout.program.rule is not None or layout.program.asks_member(layout.block_size)


def partial_only(lists: list[Tensor], asks: bool) -> list[Tensor | None]:
    """All tiles as partial ones: torch's decoding kernel shares those out evenly, but full ones by
    where their keys would stand if all were listed.

    With ``asks`` some may be partial. Of nothing but the lists: other lengths run the same kernel.
    """
    some, some_at, full, full_at = lists[:4]
    if not asks:
        return [full, full_at, None, None]
    width = some_at.shape[-1] + full_at.shape[-1]
    slot = torch.arange(width, dtype=torch.int32, device=some.device).expand(*some.shape, -1)

    def at(indices: Tensor, place: Tensor) -> Tensor:
        return indices.gather(-1, place.clamp(0, indices.shape[-1] - 1).to(torch.int64))

    before = some[..., None]
    joined = torch.where(slot < before, at(some_at, slot), at(full_at, slot - before))
    return [some + full, joined.contiguous(), None, None]


def _mask_mod(
    program: MaskProgram, tables: list[Tensor], pointed: list[bool], block_size: tuple[int, int]
) -> MaskMod:
    """The mask_mod over tables, of which the ``pointed`` numbers are read as tables of one."""
    if not any(pointed):
        return program.within(tables, block_size)
    given = [t.reshape(1) if p else t for t, p in zip(tables, pointed, strict=True)]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        read = [t[h - h] if p else t for t, p in zip(given, pointed, strict=True)]
        return program.within(read, block_size)(b, h, q_idx, kv_idx)

    return mask_mod


def _score_mod(
    score: ScoreProgram, tables: list[Tensor], split: list[str]
) -> Callable[..., Tensor]:
    """The score_mod over tables that torch can differentiate.

    torch sums a captured tensor's gradient where the tensor is indexed, once: a learned number is
    read as a table of one, and a learned tensor that is read twice is read from a copy. The index
    must be a scalar of the kernel or one value a pair, so what the address computes from scalars is
    spread over the rows.
    """
    spread = any(t.requires_grad for t in tables) and score.address.kernel_batch(1) > 1
    given = [
        table.reshape(1) if form == "scalar" else table.clone() if form == "again" else table
        for table, form in zip(tables, split, strict=True)
    ]

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        read = [t[h - h] if form == "scalar" else t for t, form in zip(given, split, strict=True)]
        if spread:
            b, h = b + (q_idx - q_idx), h + (q_idx - q_idx)
        return score.mod(read)(s, b, h, q_idx, kv_idx)

    return score_mod


def _reading(work: Work, speech: Speech) -> list[str]:
    """How each score table must be read for torch to differentiate it, or to read it at all."""
    if work.score is None:
        return []
    first = len(work.score_tables) - len(work.score.score.repeated)
    forms = []
    for i, table in enumerate(work.score_tables):
        again = i >= first and work.score.score.repeated[i - first]
        scalar = table.ndim == 0
        form = "scalar" if scalar else "again" if again else "plain"
        needed = table.requires_grad or (scalar and speech.points)
        forms.append(form if needed else "plain")
    return forms


def kernel_options(layout: Layout, q: Tensor, k: Tensor, gathers: int) -> dict[str, Any]:
    """What torch must be told about tiles that are not multiples of its own, and about tables.

    Triton prefetches what a mod reads for each pair into shared memory, a word a pair and stage, and
    torch's defaults do not reckon with it.
    """
    if q.device.type == "cpu":
        return {}
    options: dict[str, Any] = {}
    if gathers and q.shape[-1] <= 64:
        options["fwd_BLOCK_N"] = 64
    if gathers > 1:
        options["num_stages"] = 2 if gathers == 2 else 1
    elif gathers:
        options["bwd_num_stages"] = 2
    q_tile, kv_tile = layout.block_size
    if q_tile % TRAINING_TILE or kv_tile % TRAINING_TILE:
        wide = q.shape[-1] > 128 or q.dtype == torch.float32
        options["fwd_BLOCK_M"] = math.gcd(q_tile, 32 if wide else 128)
        options["fwd_BLOCK_N"] = math.gcd(kv_tile, 32 if wide else 64)
        rows = options["fwd_BLOCK_M"]
        if rows in _SHORT and not wide:
            keys, stages, warps = _SHORT[rows]
            options["fwd_BLOCK_N"] = math.gcd(kv_tile, keys)
            stages = min(stages, options.get("num_stages", stages))
            options |= {"fwd_num_stages": stages, "fwd_num_warps": warps}
        elif rows == 16:
            # Four warps would share one row of tensor cores' tiles.
            options["fwd_num_warps"] = 2
    elif gathers == 1 and q.element_size() == 2 and 64 < q.shape[-1] <= 128:
        options |= _READING
    one_tile = max(q.shape[2], k.shape[2]) <= TRAINING_TILE
    if one_tile or q.shape[2] % q_tile or k.shape[2] % kv_tile:
        # torch drops its bounds checks for lengths in whole 128s, whatever the tile.
        options["IS_DIVISIBLE"] = False
    elif not (q.shape[2] % 128 or k.shape[2] % 128):
        # And keeps them where it compiles for lengths that vary: a quarter of a backward's time.
        options["IS_DIVISIBLE"] = True
    # Also where queries are many: torch would ask for their number, and compile anew for few.
    options["FORCE_USE_FLEX_ATTENTION"] = True
    return options


def _decode_options(work: Work, gathers: int) -> dict[str, Any]:
    """Measured on Hopper: four stages of four warps come nearest to the memory's pace."""
    key_bytes = (work.q.shape[-1] + work.v.shape[-1]) * work.q.element_size()
    if gathers > 1 or _DECODE_KEYS * key_bytes > _DECODE_BYTES:
        return {"num_stages": 1}
    return {"num_stages": 4, "num_warps": 4}


def _enter(
    work: Work, call: tuple[Any, ...], options: dict[str, Any], speech: Speech
) -> tuple[Tensor, Tensor | None]:
    """The call in the compiled function of its kind."""
    program, score = work.layout.program, work.score
    told = dict(options)
    whole = told.pop("IS_DIVISIBLE", None)
    kind = (
        "flex",
        program.key,
        score.key if score else None,
        work.layout.block_size,
        work.scale,
        work.lse,
        tuple(told.items()),
        _decoding(work, speech),
        tuple(_reading(work, speech)),
        *(tuple(t.shape[i] for i in (0, 1, 3)) for t in (work.q, work.k, work.v)),
    )
    label = f"{program.key}/{score.key if score else '-'}"

    def what() -> str:
        names = [t.name for t in (program.rule, score and score.score) if t]
        return (
            f"{' with '.join(names) or 'attention'} for q {list(work.q.shape)} {work.q.dtype} on "
            f"{work.q.device}"
        )

    found: tuple[Tensor, Tensor | None]
    found, kernel = entered(
        kind, call, lambda: _body(work, options, speech), label, what, lengths=(whole,),
        together=_lengths(call[3], work.layout.select is not None),
    )  # fmt: skip
    remember(work, "flash" if options.get("BACKEND") == "FLASH" else name, kernel)
    return found


def _lengths(lists: list[Tensor], selected: bool) -> frozenset[int]:
    """Where among the sizes of a call those of q, k and v and of the lists follow the lengths.

    Of a selection a row's list is as wide as its candidates need, however long the sequence.
    """
    place, found = 12, [2, 6, 10]
    for i, x in enumerate(lists):
        found += [place + 2] if selected and i < 4 else range(place + 2, place + x.ndim)
        place += x.ndim
    return frozenset(found)


def _clear_unlisted(out: Tensor, layout: Layout) -> Tensor:
    """torch's CPU decoding kernel gives NaN for a head without a single tile."""
    none = (layout.kv_num_blocks + layout.full_kv_num_blocks)[..., :1, None] == 0
    return out.masked_fill(none, 0)
