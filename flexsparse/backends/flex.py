"""Compiled FlexAttention: one fused kernel for each kind of call.

torch's FlexAttention is only ever entered compiled and whole: eager it ignores block lists, and after
a failed or over-specialised compile it silently becomes eager. So arguments are judged before, and
each kind of call has a compiled function of its own that never needs to specialise again.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexsparse.backends import Call, Work
from flexsparse.device import compiles
from flexsparse.errors import CompileError
from flexsparse.layout import Layout, as_block_mask, widened
from flexsparse.program import ScoreProgram

name = "flex"

# The tiles of torch's own backward on 16-bit inputs: lists must be whole multiples of them.
TRAINING_TILE = 128
# Query rows that torch's decoding kernel can hold for one KV head, and the row tile it needs.
DECODE_ROWS = 128

Kernel = Callable[..., Any]
_kernels: dict[tuple[object, ...], Kernel] = {}
_first_sizes: dict[tuple[object, ...], tuple[int, ...]] = {}


def refuses(call: Call) -> str | None:
    """Why FlexAttention cannot run this call, or None."""
    if call.dtype == torch.float64:
        return "compiled FlexAttention has no fp64"
    if call.device.type == "cpu":
        if call.grads:
            return "FlexAttention has no backward on CPU"
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


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    layout = work.layout
    on_cpu = work.q.device.type == "cpu"
    q, k, v = (x.detach() if on_cpu else x for x in (work.q, work.k, work.v))
    # Without gradients the lists by column are not read; on CPU torch asks for lists at full width.
    lists: list[Tensor] = layout.lists if work.grads else layout.lists[:4]
    lists = widened(lists, layout.span) if on_cpu else lists
    tables = [t.detach() for t in layout.tables]
    learned = list(work.score_tables)
    call = (q, k, v, lists, tables, learned)
    if torch.compiler.is_compiling():
        out, lse = _body(layout, work)(*call)
    else:
        out, lse = _enter(work, call)
    if on_cpu and q.shape[2] == 1:
        out = _clear_unlisted(out, layout)
    return out, lse


def _body(layout: Layout, work: Work) -> Kernel:
    """The function to compile. It closes over decisions only; every tensor is an argument."""
    program, score, scale, want_lse = layout.program, work.score, work.scale, work.lse
    block_size, options = layout.block_size, _options(work)
    split = _reading(work)

    def flex(
        q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], tables: list[Tensor],
        score_tables: list[Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        lengths = (q.shape[2], k.shape[2])
        keywords: dict[str, Any] = {
            "score_mod": None if score is None else _score_mod(score, score_tables, split),
            "block_mask": as_block_mask(
                lists, lengths, block_size, program.within(tables, block_size)
            ),
            "scale": scale,
            "enable_gqa": q.shape[1] != k.shape[1],
            "kernel_options": options,
        }
        if not want_lse:
            return flex_attention(q, k, v, **keywords), None
        out, aux = flex_attention(q, k, v, **keywords, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    return flex


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


def _reading(work: Work) -> list[str]:
    """How each score table must be read for torch to differentiate it."""
    if work.score is None:
        return []
    first = len(work.score_tables) - len(work.score.score.repeated)
    forms = []
    for i, table in enumerate(work.score_tables):
        again = i >= first and work.score.score.repeated[i - first]
        scalar = table.ndim == 0
        form = "scalar" if scalar else "again" if again else "plain"
        forms.append(form if table.requires_grad else "plain")
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
        if options["fwd_BLOCK_M"] == 16:
            # Four warps would share one row of tensor cores' tiles.
            options["fwd_num_warps"] = 2
    if q.shape[2] % q_tile or k.shape[2] % kv_tile:
        # torch drops its bounds checks for lengths in whole 128s, whatever the tile.
        options["IS_DIVISIBLE"] = False
    group = q.shape[1] // k.shape[1]
    rows = 1 << (q.shape[2] * group - 1).bit_length()
    odd = "fwd_BLOCK_M" in options or "IS_DIVISIBLE" in options
    if q.shape[2] < DECODE_ROWS and (odd or rows > DECODE_ROWS or q_tile % DECODE_ROWS):
        options["FORCE_USE_FLEX_ATTENTION"] = True
    return options


def _options(work: Work) -> dict[str, Any]:
    gathers = work.layout.program.gathers(work.layout.block_size) + (
        work.score.score.gathers if work.score else 0
    )
    return kernel_options(work.layout, work.q, work.k, gathers)


def _enter(work: Work, call: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    kernel, fresh = _kernel(work, call)
    try:
        result: tuple[Tensor, Tensor | None] = kernel(*call)
    except Exception as error:
        if fresh is not None:
            _kernels.pop(fresh, None)
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        names = [t.name for t in (work.layout.program.rule, work.score and work.score.score) if t]
        raise CompileError(
            f"torch could not compile {' with '.join(names) or 'attention'} for "
            f"q {list(work.q.shape)} {work.q.dtype} on {work.q.device}: {_first_line(error)}"
        ) from error
    return result


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _kernel(work: Work, call: tuple[Any, ...]) -> tuple[Kernel, tuple[object, ...] | None]:
    """The compiled function of this kind of call, and its key if it is new.

    On CUDA the second length of a kind gets a kernel for all lengths. On CPU lengths are static:
    torch's CPU template writes wrong code for some sizes that vary.
    """
    tensors = [t for t in _flat(call) if t is not None]
    kind = (
        work.layout.program.key,
        work.score.key if work.score else None,
        work.layout.block_size,
        work.scale,
        work.lse,
        work.q.device,
        torch.is_grad_enabled(),
        tuple(_options(work).items()),
        tuple(_reading(work)),
        tuple((t.dtype, t.ndim, t.requires_grad, t.is_contiguous()) for t in tensors),
        *(tuple(t.shape[i] for i in (0, 1, 3)) for t in (work.q, work.k, work.v)),
    )
    sizes = tuple(n for t in tensors for n in t.shape)
    first = _first_sizes.setdefault(kind, sizes)
    varying: tuple[int, ...] = ()
    key: tuple[object, ...] = (*kind, sizes)
    if work.q.device.type != "cpu" and sizes != first:
        varying = tuple(i for i, n in enumerate(sizes) if n != first[i])
        key = (*kind, varying, _pattern([sizes[i] for i in varying]))
    if key in _kernels:
        return _kernels[key], None
    body = _body(work.layout, work)
    assert isinstance(body, types.FunctionType)
    # torch counts specialisations per code object, so each kernel gets one of its own.
    own = types.FunctionType(
        body.__code__.replace(co_name=f"flex_{len(_kernels)}"),
        body.__globals__,
        body.__name__,
        body.__defaults__,
        body.__closure__,
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False)
    _kernels[key] = _marked(compiled, varying) if varying else compiled
    compiles.note(f"{work.layout.program.key}/{work.score.key if work.score else '-'}")
    return _kernels[key], key


def _pattern(sizes: list[int]) -> tuple[object, ...]:
    """Which sizes are equal, or 1: torch makes each such pattern a kernel of its own."""
    order: dict[int, int] = {}
    return tuple(n if n in (0, 1) else order.setdefault(n, len(order) + 2) for n in sizes)


def _marked(kernel: Kernel, varying: tuple[int, ...]) -> Kernel:
    """``kernel`` told which sizes vary, counted through all tensors; the others are constants.

    The mark goes on a view: the caller's own tensors carry none.
    """

    def marking(*call: Any) -> Any:
        place = 0

        def mark(t: Tensor | None) -> Tensor | None:
            nonlocal place
            if t is None:
                return None
            t = t.view_as(t)
            for axis in range(t.ndim):
                if place + axis in varying:
                    torch._dynamo.maybe_mark_dynamic(t, axis)
            place += t.ndim
            return t

        return kernel(*([mark(t) for t in x] if isinstance(x, list) else mark(x) for x in call))

    return marking


def _flat(call: tuple[Any, ...]) -> list[Tensor | None]:
    return [t for x in call for t in (x if isinstance(x, list) else [x])]


def _clear_unlisted(out: Tensor, layout: Layout) -> Tensor:
    """torch's CPU decoding kernel gives NaN for a head without a single tile."""
    none = (layout.kv_num_blocks + layout.full_kv_num_blocks)[..., :1, None] == 0
    return out.masked_fill(none, 0)
