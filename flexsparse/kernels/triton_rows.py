"""`row_tiles` as one kernel, where many candidates meet a row of tiles, or blocks and tiles lie across each
other: its map in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.geometry import Geometry
from flexsparse.kernels.launching import dispatch
from flexsparse.kernels.rows import RowTiles, Source
from flexsparse.kernels.triton_merge import lines_of
from flexsparse.kernels.triton_words import set_bits
from flexsparse.shapes import next_power_of_two

_MOST_AT_ONCE = 1024
# One row of a map must fit into the registers of a program.
MOST_COLUMNS = 2**14


def writes_whole(geometry: Geometry) -> bool:
    """Whether bits are written rather than set."""
    return True


@triton.jit
def _write_row(
    num, idx, bits, listed, column, out, line, columns, capacity,
    HAS_BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of row ``out`` the columns that are ``listed``, zeros behind; and as bits, in ``line``."""
    one = listed.to(tl.int32)
    count = tl.sum(one, 0)
    tl.store(num + out, count)
    tl.store(idx + out * capacity + tl.cumsum(one, 0) - 1, column, mask=listed)
    for start in range(0, capacity, COLUMNS):
        slot = start + column
        tl.store(idx + out * capacity + slot, 0, mask=(slot >= count) & (slot < capacity))
    if HAS_BITS:
        width: tl.constexpr = COLUMNS // 32
        in_row = (columns + 31) // 32
        w = tl.arange(0, width)
        word = tl.sum(tl.reshape(one, [width, 32]) << tl.arange(0, 32)[None, :], 1)
        tl.store(bits + line * in_row + w, word, mask=w < in_row)


@triton.jit
def _rows(
    indices, codes, words, partial_num, partial_idx, full_num, full_idx, bits, these,
    sel_rows, kept, rows, columns, lanes, candidates, q_len, kv_len,
    sel_heads, query_heads, list_heads, code_heads, capacity,
    SEL_BATCHED: tl.constexpr, CODE_BATCHED: tl.constexpr, HAS_CODES: tl.constexpr,
    HAS_WORDS: tl.constexpr, HAS_BITS: tl.constexpr, HAS_AT: tl.constexpr,
    FOLD: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    if HAS_AT:
        r = tl.load(these + r).to(tl.int32)
    lane = tl.program_id(1)
    # Several lists may be made from one: the first of them writes its words.
    sel_b, sel_h, code_line, writes = lines_of(
        lane, sel_heads, query_heads, list_heads, code_heads, SEL_BATCHED, CODE_BATCHED, FOLD
    )

    first = r * Q_TILE // Q_BLOCK
    last = (min((r + 1) * Q_TILE, q_len) - 1) // Q_BLOCK
    column = tl.arange(0, COLUMNS)
    met = tl.zeros([COLUMNS], tl.int32)
    word_line = (sel_b * sel_heads + sel_h).to(tl.int64) * ((sel_rows + 7) // 8)
    # The rows of candidates that meet a row of tiles lie behind each other.
    line = ((sel_b * sel_heads + sel_h).to(tl.int64) * sel_rows + first) * kept
    met_here = (last - first + 1) * kept
    for start in range(0, ROWS * kept, AT_ONCE):
        k = start + tl.arange(0, AT_ONCE)
        chosen = tl.load(indices + line + k, mask=k < met_here, other=-1)
        used = chosen >= 0
        if HAS_WORDS:
            row = first + k // kept
            bit = 1 << (row % 8).to(tl.int32)
            set_bits(words, word_line, row, candidates, chosen, bit, used & writes)
        c = chosen * KV_BLOCK // KV_TILE
        end = (tl.minimum((chosen + 1) * KV_BLOCK, kv_len) - 1) // KV_TILE
        for step in tl.static_range(STEPS):
            hit = used & (c + step <= end)
            met += tl.histogram(c + step, COLUMNS, mask=hit)

    blocks = (tl.minimum((column + 1) * KV_TILE, kv_len) - 1) // KV_BLOCK
    blocks = blocks - column * KV_TILE // KV_BLOCK + 1
    touched = (met > 0) & (column < columns)
    covered = met == (last - first + 1) * blocks
    if HAS_CODES:
        at = (code_line.to(tl.int64) * rows + r) * columns
        code = tl.load(codes + at + column, mask=touched, other=0)
        full = touched & covered & (code == 2)
        partial = touched & (code != 0) & (~full)
    else:
        full = touched & covered
        partial = touched & (~full)

    out = lane.to(tl.int64) * rows + r
    _write_row(
        partial_num,
        partial_idx,
        bits,
        partial,
        column,
        out,
        out,
        columns,
        capacity,
        HAS_BITS,
        COLUMNS,
    )
    # Bits of full tiles stand behind all of the partial.
    line = lanes * rows + out
    _write_row(
        full_num, full_idx, bits, full, column, out, line, columns, capacity, HAS_BITS, COLUMNS
    )


def fill(source: Source, into: RowTiles, at: Tensor | None) -> None:
    """Writes ``into``, whose words are clear; with ``at`` the lists of these rows alone."""
    indices, candidates, codes, geometry, lists = source
    _, heads, sel_rows, kept = indices.shape
    rows, columns = geometry.tiles
    at_once = max(16, min(_MOST_AT_ONCE, next_power_of_two(geometry.rows_per_tile * kept)))
    width = max(32, next_power_of_two(columns))
    dispatch(
        _rows, (rows if at is None else len(at), lists.batch * lists.heads),
        indices.contiguous(), codes if codes is not None else indices, into.words,
        *into[:4], into.bits, indices if at is None else at, sel_rows, kept, rows, columns,
        lists.batch * lists.heads, candidates, geometry.q_len, geometry.kv_len, heads,
        lists.query_heads, lists.heads, 1 if codes is None else codes.shape[1],
        into.partial_idx.shape[-1],
        **source.constants(into, at),
        Q_BLOCK=min(geometry.q_block, geometry.q_len),
        KV_BLOCK=min(geometry.kv_block, geometry.kv_len),
        Q_TILE=geometry.q_tile, KV_TILE=geometry.kv_tile,
        ROWS=geometry.rows_per_tile, STEPS=geometry.tiles_per_candidate, AT_ONCE=at_once,
        COLUMNS=width,
        num_warps=4 if geometry.rows_per_tile * kept < 4096 else 8,
    )  # fmt: skip
