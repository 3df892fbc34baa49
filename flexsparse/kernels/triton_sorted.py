"""`row_tiles` as one kernel that sorts: candidates of all rows that meet a row of tiles, in any order.

Repeats and neighbours then lie side by side, and nothing is as wide as the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels import triton_merge
from flexsparse.kernels.geometry import Geometry
from flexsparse.kernels.rows import RowTiles, Source
from flexsparse.kernels.triton_merge import job_of, launch, lines_of, write_tiles
from flexsparse.kernels.triton_words import set_bits
from flexsparse.shapes import ceil_div

# Numbers that a program sorts.
MOST = 1024
# Sorting takes the square of its numbers, a map its columns: 128 numbers took 2.9 ns, 256 8, 512 29 and
# 1024 100 for each row of tiles, a map of 256 columns 5 to 8 and of 512 8.
_A_COLUMN = 128
# Stands for what is no candidate, behind all that are.
_NONE = tl.constexpr(2**31 - 1)


def takes(kept: int, geometry: Geometry) -> bool:
    """Whether blocks and tiles nest both ways, and what meets a row of tiles can be sorted at once."""
    g = geometry
    down = not g.q_block % g.q_tile or not g.q_tile % g.q_block
    across = not g.kv_block % g.kv_tile or not g.kv_tile % g.kv_block
    finer, coarser = sorted((g.kv_block, g.kv_tile))
    finest = ceil_div(g.kv_len, finer) + coarser // finer
    told_apart = finest * g.rows_per_tile < _NONE.value
    return down and across and told_apart and _numbers(kept, g) <= MOST


def suits(kept: int, geometry: Geometry) -> bool:
    """Whether it takes these, and a map of a row of tiles would not be faster."""
    cost = 0 if geometry.rows_per_tile == 1 else _numbers(kept, geometry) ** 2
    return takes(kept, geometry) and cost <= _A_COLUMN * geometry.tiles[1]


def _numbers(kept: int, geometry: Geometry) -> int:
    return geometry.rows_per_tile * kept * geometry.tiles_per_candidate


def writes_whole(geometry: Geometry) -> bool:
    """Whether bits are written rather than set."""
    return geometry.rows_per_tile == 1 and triton_merge.writes_whole(geometry)


@triton.jit
def _added(began, sum_of, begins, value):
    return began | begins, tl.where(begins != 0, value, sum_of + value)


@triton.jit
def _sum_so_far(value, begins):
    """Of its run, of which the first is marked."""
    return tl.associative_scan((begins.to(tl.int32), value), 1, _added)[1]


@triton.jit
def _byte_of(number, first, MET: tl.constexpr):
    """Tells apart the bytes in which numbers of a row of tiles are marked, eight rows to one."""
    own = number % MET
    return number - own + ((first % 8).to(tl.int32) + own) // 8


@triton.jit
def _sorted(
    given, codes, words, partial_num, partial_idx, full_num, full_idx, bits, at,
    sel_rows, kept, rows, listed_rows, columns, lanes, candidates, sel_heads, query_heads, list_heads,
    code_heads, capacity, stride_b, stride_h, stride_r, stride_k,
    SEL_BATCHED: tl.constexpr, CODE_BATCHED: tl.constexpr, HAS_CODES: tl.constexpr,
    HAS_WORDS: tl.constexpr, HAS_BITS: tl.constexpr, HAS_AT: tl.constexpr, WHOLE: tl.constexpr,
    FOLD: tl.constexpr, TILES_DOWN: tl.constexpr, MET: tl.constexpr, STEPS: tl.constexpr,
    INSIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    lane, r, exists = job_of(at, lanes, listed_rows, ROWS, HAS_AT)
    out = lane * rows + r
    sel_b, sel_h, code_line, writes = lines_of(
        lane, sel_heads, query_heads, list_heads, code_heads, SEL_BATCHED, CODE_BATCHED, FOLD
    )
    # Several lists, and rows of tiles, may be made from one row: the first of them writes its words.
    writes = writes & (r % TILES_DOWN == 0)
    first = r // TILES_DOWN * MET

    # A number is a candidate's tile, or where tiles hold several the candidate, and among them its row.
    slot = tl.arange(0, WIDTH)[None, :]
    named = slot // STEPS
    own, k = named // kept, (named % kept).to(tl.int64)
    inside = exists & (own < MET) & (first + own < sel_rows)
    spot = sel_b * stride_b + sel_h * stride_h + (first + own) * stride_r + k * stride_k
    chosen = tl.load(given + spot, mask=inside, other=-1)
    used = (chosen >= 0) & (chosen < candidates)
    number = (chosen * STEPS + slot % STEPS) * MET + own
    number = tl.sort(tl.where(used, number, _NONE).to(tl.int32), dim=1)
    before = tl.gather(number, tl.maximum(slot - 1, 0) + tl.zeros_like(number), 1)
    after = tl.gather(number, tl.minimum(slot + 1, WIDTH - 1) + tl.zeros_like(number), 1)
    begins, ends = slot == 0, slot == WIDTH - 1
    fresh = begins | (before != number)

    if HAS_WORDS:
        # All rows of a byte are set at once.
        line, row = number // MET, first + number % MET
        marks = tl.full([ROWS, WIDTH], 1, tl.int32) << (row % 8).to(tl.int32)
        within = _byte_of(number, first, MET)
        if MET > 1:
            marks = tl.where(fresh, marks, 0)
            marks = _sum_so_far(marks, begins | (_byte_of(before, first, MET) != within))
        speaks = ends | (_byte_of(after, first, MET) != within)
        speaks = speaks & (number != _NONE) & (line % STEPS == 0)
        source = sel_b * sel_heads + sel_h
        set_bits(
            words, source * ((sel_rows + 7) // 8), row, candidates, line // STEPS, marks,
            speaks & writes & exists,
        )  # fmt: skip

    tile = number // (MET * INSIDE)
    last = exists & (tile < columns) & (ends | (after // (MET * INSIDE) != tile))
    if MET * INSIDE > 1:
        met = _sum_so_far(fresh.to(tl.int32), begins | (before // (MET * INSIDE) != tile))
        need = tl.minimum(MET, sel_rows - first)
        if INSIDE > 1:
            need = need * (tl.minimum((tile + 1) * INSIDE, candidates) - tile * INSIDE)
        covered = last & (met == need)
    else:
        covered = last
    write_tiles(
        last, covered, tile, codes, code_line, partial_num, partial_idx, full_num, full_idx, bits,
        lanes, rows, columns, capacity, r, out, slot, exists, HAS_CODES, HAS_BITS, WHOLE, WIDTH,
    )  # fmt: skip


def fill(source: Source, into: RowTiles, at: Tensor | None) -> None:
    """Writes ``into``, whose words are clear, and bits unless they are written whole; with ``at`` the
    lists of these rows alone."""
    whole, met = writes_whole(source.geometry), source.geometry.rows_per_tile
    launch(_sorted, source, into, at, WHOLE=whole, MET=met)
