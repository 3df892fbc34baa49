"""`marked` and `tile_codes` as kernels: an atomic operation a candidate, then each word read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.kernels.launching import dispatch
from flexsparse.kernels.membership import WORD
from flexsparse.shapes import ceil_div, next_power_of_two

_NUMBERS_A_PROGRAM = 1024
# Columns of a program: those of one word of bits.
_COLUMNS = 32
_MOST_KEYS = 32


@triton.jit
def set_bits(words, line, row, candidates, chosen, bits, mask):
    """``bits`` of the byte in which ``row`` stands, of the candidates ``chosen``; words begin at ``line``."""
    # Bytes are marked four at once: there is no atomic operation on one.
    byte = (line + row // 8) * candidates + chosen
    four = words.to(tl.pointer_type(tl.int32), bitcast=True) + byte // 4
    tl.atomic_or(four, bits << (byte % 4 * 8).to(tl.int32), mask=mask, sem="relaxed")


@triton.jit
def _mark(
    given, words, lines, heads, rows, kept, candidates, stride_b, stride_h, stride_r, stride_k,
    ROWS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    line = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    slot = (tl.program_id(1) * KEPT + tl.arange(0, KEPT))[None, :].to(tl.int64)
    lane, row = line // rows, line % rows
    spot = lane // heads * stride_b + lane % heads * stride_h + row * stride_r + slot * stride_k
    chosen = tl.load(given + spot, mask=(line < lines) & (slot < kept), other=-1)
    used = (chosen >= 0) & (chosen < candidates)
    bit = 1 << (row % 8).to(tl.int32)
    set_bits(words, lane * ((rows + 7) // 8), row, candidates, chosen, bit, used)


def mark(given: Tensor, candidates: int) -> Tensor:
    batch, heads, rows, kept = given.shape
    shape = (batch, heads, ceil_div(rows, WORD), candidates)
    size = batch * heads * shape[2] * candidates
    fours = torch.zeros(ceil_div(size, 4), dtype=torch.int32, device=given.device)
    words = fours.view(torch.uint8)[:size].view(shape)
    width = min(_NUMBERS_A_PROGRAM, next_power_of_two(kept))
    together = _NUMBERS_A_PROGRAM // width
    lines = batch * heads * rows
    dispatch(
        _mark, (ceil_div(lines, together), ceil_div(kept, width)),
        given, words, lines, heads, rows, kept, candidates, *given.stride(),
        ROWS=together, KEPT=width, num_warps=4,
    )  # fmt: skip
    return words


@triton.jit
def _tile_codes(
    words, codes, found, bits, q_len, kv_len, rows, columns, lanes,
    sel_heads, query_heads, list_heads, code_heads,
    SEL_BATCHED: tl.constexpr, CODE_BATCHED: tl.constexpr, HAS_CODES: tl.constexpr,
    FOLD: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    in_row = (columns + 31) // 32
    r, w = tl.program_id(0) // in_row, tl.program_id(0) % in_row
    source = tl.program_id(1)
    column = w * COLUMNS + tl.arange(0, COLUMNS)
    start = r * Q_TILE
    end = tl.minimum(start + Q_TILE, q_len)
    line = source.to(tl.int64) * ((q_len + 7) // 8)
    touched = tl.zeros([COLUMNS], tl.int32)
    covered = tl.full([COLUMNS], 1, tl.int32)
    for piece in range(0, KV_TILE, KEYS):
        within = piece + tl.arange(0, KEYS)[None, :]
        key = column[:, None] * KV_TILE + within
        there = (within < KV_TILE) & (key < kv_len)
        some = tl.zeros([COLUMNS, KEYS], tl.int32)
        every = tl.full([COLUMNS, KEYS], -1, tl.int32)
        for byte in range(start // 8, (end + 7) // 8):
            # The queries of the byte that are of these tiles.
            first = tl.maximum(start - byte * 8, 0)
            last = tl.minimum(end - byte * 8, 8)
            own = ((1 << last) - (1 << first)) * EACH
            word = tl.load(words + (line + byte) * kv_len + key, mask=there, other=0).to(tl.int32)
            some |= word & own
            every &= word | ~own
        touched |= tl.max((some != 0).to(tl.int32), 1)
        covered &= tl.min(((every == -1) | ~there).to(tl.int32), 1)

    exists = column < columns
    place = tl.arange(0, COLUMNS)
    for lane in range(lanes):
        entry = lane // list_heads
        b = entry // FOLD
        h = entry % FOLD * (query_heads // FOLD) + lane % list_heads
        made_from = h * sel_heads // query_heads
        if SEL_BATCHED:
            made_from += b * sel_heads
        if made_from == source:
            full = exists & (touched > 0) & (covered > 0)
            partial = exists & (touched > 0) & (covered == 0)
            if HAS_CODES:
                code_line = h * code_heads // query_heads
                if CODE_BATCHED:
                    code_line += b * code_heads
                at = (code_line * rows + r.to(tl.int64)) * columns
                code = tl.load(codes + at + column, mask=exists, other=0)
                partial = (partial | (full & (code != 2))) & (code != 0)
                full = full & (code == 2)
            out = lane * rows + r.to(tl.int64)
            value = partial.to(tl.int32) + 2 * full.to(tl.int32)
            tl.store(found + out * columns + column, value.to(tl.int8), mask=exists)
            word = tl.sum(partial.to(tl.int32) << place, 0)
            tl.store(bits + out * in_row + w, word)
            word = tl.sum(full.to(tl.int32) << place, 0)
            tl.store(bits + (lanes * rows + out) * in_row + w, word)


def launch(
    words: Tensor, codes: Tensor | None, geometry: Geometry, lists: Lists
) -> tuple[Tensor, Tensor]:
    batch, heads = words.shape[:2]
    rows, columns = geometry.tiles
    in_row = ceil_div(columns, 32)
    shape = (lists.batch, lists.heads, rows)
    found = torch.empty((*shape, columns), dtype=torch.int8, device=words.device)
    bits = torch.empty((2, *shape, in_row), dtype=torch.int32, device=words.device)
    kv_len, kv_tile, each = geometry.kv_len, geometry.kv_tile, 1
    if not (kv_len % 4 or kv_tile % 4 or words.data_ptr() % 4):
        # The bytes of four keys at once: what is done to one is done to each.
        words, kv_len, kv_tile, each = (
            words.view(torch.int32),
            kv_len // 4,
            kv_tile // 4,
            0x01010101,
        )
    dispatch(
        _tile_codes, (rows * in_row, batch * heads),
        words, found if codes is None else codes.contiguous(), found, bits,
        geometry.q_len, kv_len, rows, columns, lists.batch * lists.heads,
        heads, lists.query_heads, lists.heads, 1 if codes is None else codes.shape[1],
        SEL_BATCHED=batch > 1, CODE_BATCHED=codes is not None and codes.shape[0] > 1,
        HAS_CODES=codes is not None, FOLD=lists.fold, Q_TILE=geometry.q_tile,
        KV_TILE=kv_tile, KEYS=min(_MOST_KEYS, next_power_of_two(kv_tile)), COLUMNS=_COLUMNS, EACH=each,
        num_warps=4,
    )  # fmt: skip
    return found, bits
