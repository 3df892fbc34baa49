"""`block_mass` as two kernels: each query's normaliser, then the mass of blocks; no weight is kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsparse.kernels.block_mass import Around
from flexsparse.kernels.launching import dispatch
from flexsparse.shapes import ceil_div, next_power_of_two

_LOG2_E = 1.4426950408889634
# Pairs of a query and a head, and windows, that a program multiplies at once; queries among them.
_PAIRS = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
_TOKENS = 16
_WINDOWS = 64
# The same where the queries of a row are taken some after the other, in 16 bits: half as many pairs, over
# twice as many windows, of channels that leave room for them.
_PAIRS_OF_MANY, _WINDOWS_OF_MANY = 64, 128
_MANY_BYTES = 256
_FEWEST = 16
# The channels of a query or key, so that tiles fit into shared memory.
_MOST_BYTES = 512
# Steps over windows that one program takes before another goes on.
_STEPS = 64


@triton.jit
def _queries(
    q, position, lse, b, first_head, one, i, head, real, q_len, q_b, q_h, q_i, position_b,
    SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """A tile of queries, where they stand, and their normalisers; others weigh nothing."""
    real = real & (i < q_len)
    d = tl.arange(0, D_PAD)
    at = b * q_b + (first_head + head).to(tl.int64) * q_h + i.to(tl.int64) * q_i
    x = tl.load(q + at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0)
    stand = tl.load(position + b * position_b + i, mask=real, other=-1).to(tl.int32)
    line = (one * SHARE + head).to(tl.int64) * q_len + i
    return x, stand, tl.load(lse + line, mask=real, other=float("inf"))


@triton.jit
def _normalisers(
    q, keys, position, lse, q_len, count, lists, scale,
    q_b, q_h, q_i, key_b, key_h, key_n, position_b,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WINDOWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(1)
    b = (one // lists).to(tl.int64)
    first_head = one % lists * SHARE
    kv = first_head // GROUP
    m = tl.arange(0, TOKENS * HEADS)
    # Late queries see most: they go first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    token, head = m % TOKENS, m // TOKENS
    i = first + token
    real = (head < SHARE) & (i < q_len)
    d = tl.arange(0, D_PAD)
    asked = b * q_b + (first_head + head).to(tl.int64) * q_h + i.to(tl.int64) * q_i
    x = tl.load(q + asked[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0)
    stand = tl.load(position + b * position_b + i, mask=real, other=-1).to(tl.int32)
    seen = tl.where(stand >= LENGTH - 1, (stand - (LENGTH - 1)) // STRIDE + 1, 0)
    seen = tl.minimum(seen, count)
    n = tl.arange(0, WINDOWS)
    at = keys + b * key_b + kv.to(tl.int64) * key_h
    highest = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    for start in range(0, tl.max(seen, 0), WINDOWS):
        window = start + n
        there = (window < count)[:, None] & (d < D)[None, :]
        key = tl.load(at + window[:, None].to(tl.int64) * key_n + d[None, :], mask=there, other=0)
        score = tl.dot(x, tl.trans(key), input_precision="tf32x3") * scale
        score = tl.where(window[None, :] < seen[:, None], score, float("-inf"))
        new = tl.maximum(highest, tl.max(score, 1))
        anchor = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(highest - anchor) + tl.sum(tl.exp2(score - anchor[:, None]), 1)
        highest = new
    # A query that sees nothing weighs nothing.
    found = tl.where(total > 0, highest + tl.log2(total), float("inf"))
    line = (one * SHARE + head).to(tl.int64) * q_len + i
    tl.store(lse + line, found, mask=real)


@triton.jit
def _block_mass(
    q, keys, position, lse, mass, q_len, count, lists, rows, blocks, steps, scale,
    q_b, q_h, q_i, key_b, key_h, key_n, position_b,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, STEP: tl.constexpr, START: tl.constexpr,
    WIDTH: tl.constexpr, RISE: tl.constexpr, SUMS: tl.constexpr, Q_BLOCK: tl.constexpr, SHARE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    CHUNKS: tl.constexpr, WINDOWS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(1)
    b = (one // lists).to(tl.int64)
    first_head = one % lists * SHARE
    kv = first_head // GROUP
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    # Heads are the slow axis, then the tokens of a row: what is added lies in one thread.
    m = tl.arange(0, ROWS * TOKENS * HEADS)
    row = group * ROWS + m % ROWS
    token, head = m // ROWS % TOKENS, m // (ROWS * TOKENS)
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, WINDOWS)
    j = tl.arange(0, BLOCKS)
    r = group * ROWS + tl.arange(0, ROWS)
    at = keys + b * key_b + kv.to(tl.int64) * key_h
    out = mass + (one.to(tl.int64) * rows + r)[None, :] * blocks

    # How a window of a step counts for a block of it.
    place = n[None, :] - j[:, None] * STEP
    around = (place >= 0) & (place < WIDTH)
    weight = tl.minimum(tl.minimum(place + 1, WIDTH - place), RISE).to(tl.float32)
    weight = tl.where(around, weight if SUMS else 1.0, 0.0)

    first = tl.program_id(2) * steps * AT_ONCE
    end = tl.minimum(first + steps * AT_ONCE, blocks)
    # Past what the last query sees there is nothing.
    last = tl.minimum((group + 1) * ROWS * Q_BLOCK, q_len) - 1
    stand = tl.load(position + b * position_b + last).to(tl.int32)
    seen = tl.where(stand >= LENGTH - 1, (stand - (LENGTH - 1)) // STRIDE + 1, 0)
    some = tl.where(seen > 0, (seen - 1 - START) // STEP + 1, 0)
    some = tl.minimum(end, first + tl.maximum(some - first + AT_ONCE - 1, 0) // AT_ONCE * AT_ONCE)
    if CHUNKS == 1:
        i = row * Q_BLOCK + token
        real = (head < SHARE) & (token < Q_BLOCK)
        x, stands, norm = _queries(
            q, position, lse, b, first_head, one, i, head, real, q_len, q_b, q_h, q_i, position_b,
            SHARE, D, D_PAD,
        )  # fmt: skip
        # What is no query weighs nothing by its normaliser.
        lowest = tl.min(tl.where(real & (i < q_len), stands, 2147483647), 0)
    for block in range(first, some, AT_ONCE):
        window = block * STEP + START + n
        held = (window >= 0) & (window < count)
        there = held[:, None] & (d < D)[None, :]
        key = tl.load(at + window[:, None].to(tl.int64) * key_n + d[None, :], mask=there, other=0)
        full = (window * STRIDE + LENGTH - 1)[:, None]
        if CHUNKS == 1:
            score = tl.dot(key, tl.trans(x), input_precision="tf32x3") * scale
            share = tl.exp2(score - norm[None, :])
            begin = block * STEP + START
            end_of_all = (begin + WINDOWS - 1) * STRIDE + LENGTH - 1
            if (begin < 0) | (begin + WINDOWS > count) | (end_of_all > lowest):
                share = tl.where(held[:, None] & (full <= stands[None, :]), share, 0.0)
            total = tl.sum(tl.reshape(share, [WINDOWS, TOKENS * HEADS, ROWS]), 1)
        else:
            total = tl.zeros([WINDOWS, ROWS], tl.float32)
            for chunk in range(CHUNKS):
                nth = chunk * TOKENS + token
                some_x, some_stands, some_norm = _queries(
                    q, position, lse, b, first_head, one, row * Q_BLOCK + nth, head,
                    (head < SHARE) & (nth < Q_BLOCK), q_len, q_b, q_h, q_i, position_b, SHARE, D, D_PAD,
                )  # fmt: skip
                score = tl.dot(key, tl.trans(some_x), input_precision="tf32x3") * scale
                share = tl.exp2(score - some_norm[None, :])
                share = tl.where(held[:, None] & (full <= some_stands[None, :]), share, 0.0)
                total += tl.sum(tl.reshape(share, [WINDOWS, TOKENS * HEADS, ROWS]), 1)
        each = total[None, :, :] * weight[:, :, None]
        worth = tl.sum(each, 1) if SUMS else tl.max(each, 1)
        c = block + j
        kept = (j < AT_ONCE)[:, None] & (c < end)[:, None] & (r < rows)[None, :]
        tl.store(out + c[:, None], worth, mask=kept)
    for block in range(some, end, BLOCKS):
        c = block + j
        kept = (c < end)[:, None] & (r < rows)[None, :]
        tl.store(out + c[:, None], tl.zeros([BLOCKS, ROWS], tl.float32), mask=kept)


def suits(q: Tensor, keys: Tensor, around: list[int]) -> bool:
    of = Around(*around)
    fits = q.shape[-1] * q.element_size() <= _MOST_BYTES and of.width <= _WINDOWS
    return fits and q.dtype == keys.dtype and q.dtype in _PAIRS and keys.shape[2] > 0


def launch(
    q: Tensor, keys: Tensor, position: Tensor, around: list[int], how: str, blocks: int, q_block: int,
    share: int, scale: float, lse: Tensor | None,
) -> Tensor:  # fmt: skip
    of = Around(*around)
    batch, heads, q_len, dim = q.shape
    kv_heads, count = keys.shape[1:3]
    lists, rows = heads // share, ceil_div(q_len, q_block)
    q, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys))
    position = position.contiguous()
    norm = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
    mass = torch.empty((batch, lists, rows, blocks), dtype=torch.float32, device=q.device)
    shared = next_power_of_two(share)
    tokens = max(1, min(_TOKENS, _PAIRS[q.dtype] // shared))
    tokens = min(tokens, max(ceil_div(_FEWEST, shared), next_power_of_two(q_len)))
    given = (*q.stride()[:3], *keys.stride()[:3], 0 if len(position) == 1 else position.stride(0))
    both = {
        "STRIDE": of.stride, "LENGTH": of.length, "SHARE": share, "GROUP": heads // kv_heads,
        "HEADS": shared, "D": dim, "D_PAD": max(16, next_power_of_two(dim)),
    }  # fmt: skip
    if lse is not None:
        # As the kernel has it: of powers of two, and what sees nothing weighs nothing.
        norm = torch.where(lse == -torch.inf, torch.inf, lse.float() * _LOG2_E).contiguous()
    else:
        dispatch(
            _normalisers, (ceil_div(q_len, tokens), batch * lists),
            q, keys, position, norm, q_len, count, lists, scale * _LOG2_E, *given, TOKENS=tokens,
            WINDOWS=_WINDOWS, **both, num_warps=4 if tokens * shared <= 64 else 8,
        )  # fmt: skip
    asked = min(q_block, q_len)
    windows = _WINDOWS
    some_after_the_other = next_power_of_two(asked) > tokens
    if some_after_the_other and q.element_size() == 2 and dim * 2 <= _MANY_BYTES:
        windows = _WINDOWS_OF_MANY
        tokens = max(1, min(_TOKENS, _PAIRS_OF_MANY // shared))
    # A row's queries lie side by side as far as they fit; several rows where they are few.
    within = min(next_power_of_two(asked), tokens)
    at_once = (windows - of.width) // of.step + 1
    steps = min(ceil_div(blocks, at_once), _STEPS)
    if batch * lists * ceil_div(rows, tokens // within) < 256:
        # Few programs: their steps go side by side.
        steps = 1
    dispatch(
        _block_mass, (ceil_div(rows, tokens // within), batch * lists, ceil_div(blocks, at_once * steps)),
        q, keys, position, norm, mass, q_len, count, lists, rows, blocks, steps, scale * _LOG2_E, *given,
        STEP=of.step, START=of.start, WIDTH=of.width, RISE=of.rise, SUMS=how == "sum", Q_BLOCK=asked,
        ROWS=tokens // within, TOKENS=within, CHUNKS=ceil_div(asked, within), WINDOWS=windows,
        AT_ONCE=at_once, BLOCKS=next_power_of_two(at_once), **both,
        num_warps=4, num_stages=3 if asked > within else 2,
    )  # fmt: skip
    return mass
