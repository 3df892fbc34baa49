"""`row_tiles` as one kernel, where a row of tiles meets one row of candidates: sorted candidates are
sorted tiles, so neighbours merge and nothing is as wide as the keys."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.geometry import Geometry
from flexsparse.kernels.launching import dispatch
from flexsparse.kernels.rows import RowTiles, Source
from flexsparse.kernels.triton_words import set_bits
from flexsparse.shapes import ceil_div, next_power_of_two

MOST = 4096
_NUMBERS_A_PROGRAM = 256
# Of bits in a row of tiles, that a program writes one after the other instead of setting each bit.
_MOST_WORDS = 32


def suits(kept: int, geometry: Geometry) -> bool:
    """Whether one row of candidates decides each row of tiles, and blocks and tiles nest."""
    g = geometry
    nested = not g.kv_block % g.kv_tile or not g.kv_tile % g.kv_block
    return not g.q_block % g.q_tile and nested and kept * g.tiles_per_candidate <= MOST


def writes_whole(geometry: Geometry) -> bool:
    """Whether bits are written rather than set: few words, one after the other."""
    return ceil_div(geometry.tiles[1], 32) <= _MOST_WORDS


@triton.jit
def job_of(at, lanes, listed_rows, ROWS: tl.constexpr, HAS_AT: tl.constexpr):
    """The lanes and rows of tiles of a program, ``[ROWS, 1]``, and which of them there are."""
    job = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    exists = job < lanes * listed_rows
    r = job % listed_rows
    if HAS_AT:
        r = tl.load(at + r, mask=exists, other=0).to(tl.int64)
    return job // listed_rows, r, exists


@triton.jit
def lines_of(
    lane, sel_heads, query_heads, list_heads, code_heads,
    SEL_BATCHED: tl.constexpr, CODE_BATCHED: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Of a lane of lists: batch and head of its candidates, the line of its codes, and whether it is the
    first that is made from these candidates."""
    entry = lane // list_heads
    b = entry // FOLD
    h = entry % FOLD * (query_heads // FOLD) + lane % list_heads
    sel_b = b if SEL_BATCHED else b * 0
    code_b = b if CODE_BATCHED else b * 0
    first = (h * sel_heads) % query_heads == 0
    if not SEL_BATCHED:
        first = first & (b == 0)
    code_line = code_b * code_heads + h * code_heads // query_heads
    return sel_b, h * sel_heads // query_heads, code_line, first


@triton.jit
def write_tiles(
    last, covered, tile, codes, code_line, partial_num, partial_idx, full_num, full_idx, bits,
    lanes, rows, columns, capacity, r, out, slot, exists,
    HAS_CODES: tl.constexpr, HAS_BITS: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of slots of which the ``last`` of each tile speaks for it, rising: tiles met with the rule's codes,
    as bits and lists of row ``out``."""
    if HAS_CODES:
        code = tl.load(codes + (code_line * rows + r) * columns + tile, mask=last, other=0)
        full = covered & (code == 2)
        partial = last & (code != 0) & (~full)
    else:
        full = covered
        partial = last & (~full)

    if HAS_BITS:
        in_row = (columns + 31) // 32
        mark = tl.full(tile.shape, 1, tl.int32) << (tile % 32).to(tl.int32)
        if WHOLE:
            for w in range(in_row):
                here = tile // 32 == w
                word = tl.sum(tl.where(partial & here, mark, 0), 1)[:, None]
                tl.store(bits + out * in_row + w, word, mask=exists)
                word = tl.sum(tl.where(full & here, mark, 0), 1)[:, None]
                tl.store(bits + (lanes * rows + out) * in_row + w, word, mask=exists)
        else:
            where = out * in_row + tile // 32
            tl.atomic_or(bits + where, mark, mask=partial, sem="relaxed")
            tl.atomic_or(bits + lanes * rows * in_row + where, mark, mask=full, sem="relaxed")

    _write_list(partial_num, partial_idx, partial, tile, out, slot, exists, capacity, WIDTH)
    _write_list(full_num, full_idx, full, tile, out, slot, exists, capacity, WIDTH)


@triton.jit
def _write_list(num, idx, listed, tile, out, slot, exists, capacity, WIDTH: tl.constexpr):
    one = listed.to(tl.int32)
    count = tl.sum(one, 1)[:, None]
    tl.store(num + out, count, mask=exists)
    tl.store(idx + out * capacity + tl.cumsum(one, 1) - 1, tile, mask=listed)
    for start in range(0, capacity, WIDTH):
        unused = start + slot
        tl.store(
            idx + out * capacity + unused, 0, mask=(unused >= count) & (unused < capacity) & exists
        )


@triton.jit
def _merge(
    indices, codes, words, partial_num, partial_idx, full_num, full_idx, bits, at,
    sel_rows, kept, rows, listed_rows, columns, lanes, candidates, sel_heads, query_heads, list_heads,
    code_heads, capacity, stride_b, stride_h, stride_r, stride_k,
    SEL_BATCHED: tl.constexpr, CODE_BATCHED: tl.constexpr, HAS_CODES: tl.constexpr,
    HAS_WORDS: tl.constexpr, HAS_BITS: tl.constexpr, HAS_AT: tl.constexpr,
    WHOLE: tl.constexpr, FOLD: tl.constexpr, TILES_DOWN: tl.constexpr, STEPS: tl.constexpr,
    INSIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    lane, r, exists = job_of(at, lanes, listed_rows, ROWS, HAS_AT)
    out = lane * rows + r
    sel_b, sel_h, code_line, writes = lines_of(
        lane, sel_heads, query_heads, list_heads, code_heads, SEL_BATCHED, CODE_BATCHED, FOLD
    )
    # Several lists, and rows of tiles, may be made from one row: the first of them writes its words.
    writes = exists & writes & (r % TILES_DOWN == 0)
    row = r // TILES_DOWN
    source = sel_b * sel_heads + sel_h
    line = indices + sel_b * stride_b + sel_h * stride_h + row * stride_r

    slot = tl.arange(0, WIDTH)[None, :]
    k, step = (slot // STEPS).to(tl.int64), slot % STEPS
    inside = exists & (k < kept)
    chosen = tl.load(line + k * stride_k, mask=inside, other=-1)
    used = (chosen >= 0) & (chosen < candidates)
    if HAS_WORDS:
        bit = 1 << (row % 8).to(tl.int32)
        first = used & (step == 0) & writes
        set_bits(words, source * ((sel_rows + 7) // 8), row, candidates, chosen, bit, first)

    if INSIDE == 1:
        tile = chosen * STEPS + step
        last = used & (tile < columns)
        covered = last
    else:
        # The last candidate of a tile speaks for it: where so many before it stand their number
        # below it, all of them are there.
        tile = chosen // INSIDE
        after = tl.load(line + (k + 1) * stride_k, mask=inside & (k + 1 < kept), other=-1)
        last = used & ((after < 0) | (after // INSIDE != tile))
        need = tl.minimum((tile + 1) * INSIDE, candidates) - tile * INSIDE
        start = k - need + 1
        earliest = tl.load(line + start * stride_k, mask=last & (start >= 0), other=-1)
        ends = chosen == tile * INSIDE + need - 1
        covered = last & ends & (earliest == tile * INSIDE)

    write_tiles(
        last, covered, tile, codes, code_line, partial_num, partial_idx, full_num, full_idx, bits,
        lanes, rows, columns, capacity, r, out, slot, exists, HAS_CODES, HAS_BITS, WHOLE, WIDTH,
    )  # fmt: skip


def fill(source: Source, into: RowTiles, at: Tensor | None) -> None:
    """Writes ``into``, whose words are clear, and bits unless they are written whole; with ``at`` the
    lists of these rows alone."""
    launch(_merge, source, into, at, WHOLE=writes_whole(source.geometry))


def launch(
    kernel: Any, source: Source, into: RowTiles, at: Tensor | None, **constants: object
) -> None:
    """A kernel of some rows of tiles a program, a slot for each tile that their candidates may meet."""
    indices, candidates, codes, geometry, lists = source
    _, heads, sel_rows, kept = indices.shape
    rows, columns = geometry.tiles
    listed_rows = rows if at is None else len(at)
    steps = min(max(1, geometry.kv_block // geometry.kv_tile), columns)
    width = next_power_of_two(max(2, geometry.rows_per_tile * kept * steps))
    together = max(1, _NUMBERS_A_PROGRAM // width)
    lanes = lists.batch * lists.heads
    dispatch(
        kernel, (ceil_div(lanes * listed_rows, together),),
        indices, codes if codes is not None else indices, into.words,
        *into[:4], into.bits, indices if at is None else at, sel_rows, kept, rows, listed_rows, columns,
        lanes, candidates, heads, lists.query_heads, lists.heads, 1 if codes is None else codes.shape[1],
        into.partial_idx.shape[-1], *indices.stride(),
        **source.constants(into, at),
        TILES_DOWN=max(1, min(geometry.q_block // geometry.q_tile, rows)), STEPS=steps,
        INSIDE=max(1, geometry.kv_tile // geometry.kv_block), ROWS=together, WIDTH=width,
        **constants, num_warps=max(1, min(8, together * width // 128)),
    )  # fmt: skip
