"""Candidates and lengths at random: what a selector, a router or a queue of requests would bring."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError
from flexsparse.shapes import ceil_div

# Queries and keys of a block in which the keys of neighbouring queries lie.
CLUSTER = 128


def past_blocks(
    length: int,
    lists: int,
    q_block: int,
    kv_block: int,
    keep: int | Tensor,
    draw: torch.Generator,
    *,
    first: bool = False,
) -> Tensor:
    """int64 ``[1, lists, R, K]``: the row's own last block and random earlier ones, then -1.

    ``keep`` may differ by list and row, ``[lists, R]``. With ``first`` block 0 is always kept.
    """
    rows, columns = ceil_div(length, q_block), ceil_div(length, kv_block)
    rank = torch.rand(1, lists, rows, columns, device=draw.device, generator=draw)
    row = torch.arange(rows, device=draw.device)
    own = (((row + 1) * q_block).clamp(max=length) - 1) // kv_block
    rank.masked_fill_(torch.arange(columns, device=draw.device) > own[:, None], -1)
    if first:
        rank[..., 0] = 1.5
    rank[..., row, own] = 2
    most = keep if isinstance(keep, int) else int(keep.max())
    best, index = rank.topk(min(most, columns), dim=-1)
    kept = best >= 0
    if not isinstance(keep, int):
        kept &= torch.arange(best.shape[-1], device=draw.device) < keep[..., None]
    return torch.where(kept, index, -1)


def long_tailed(
    length: int,
    lists: int,
    blocks: tuple[int, int],
    keep: int,
    tail: tuple[float, float],
    draw: torch.Generator,
) -> Tensor:
    """int64 ``[lists, R]``: how many blocks each row keeps, ``keep`` or all there are, save that the
    share ``tail[0]`` of rows, drawn from those that are late enough, keeps the share ``tail[1]`` of all.
    """
    q_block, kv_block = blocks
    rows = ceil_div(length, q_block)
    there = (
        (torch.arange(1, rows + 1, device=draw.device) * q_block).clamp(max=length) - 1
    ) // kv_block + 1
    counts = there.clamp(max=keep).repeat(lists, 1)
    long = max(1, round(tail[0] * lists * rows))
    share = Fraction(tail[1]).limit_denominator(1000)
    most = math.ceil(share / (1 - share) * (int(counts.sum()) - long * keep) / long)
    able = (there >= most).repeat(lists, 1)
    if most <= keep or int(able.sum()) < long:
        raise ArgumentError(
            f"for {long} of {lists * rows} rows to hold {float(share):.0%} of the work, each would keep "
            f"{most} blocks of the {int(there[-1])} there are beside {keep} elsewhere: change keep or "
            "length"
        )
    drawn = torch.rand(able.shape, device=draw.device, generator=draw).masked_fill_(~able, -1)
    return counts.flatten().index_fill(0, drawn.flatten().topk(long).indices, most).view(lists, -1)


def page_scores(batch: int, lists: int, pages: int, draw: torch.Generator) -> Tensor:
    """``[batch, lists, 1, pages]``: what a selector would say of each page."""
    return torch.rand(batch, lists, 1, pages, device=draw.device, generator=draw)


def past_tokens(length: int, keep: int, draw: torch.Generator) -> Tensor:
    """int64 ``[1, 1, length, keep]``: evenly from the past of each query, repeats among them."""
    row = torch.arange(1, length + 1, device=draw.device)[:, None]
    shape = (1, 1, length, min(keep, length))
    return (torch.rand(shape, device=draw.device, generator=draw) * row).long()


def clustered_tokens(blocks: Tensor, length: int, keep: int, draw: torch.Generator) -> Tensor:
    """int64 ``[1, 1, length, K]``: for each query ``keep`` keys of each of its ``blocks [1, 1, R, K]``."""
    number = blocks[0, 0].repeat_interleave(CLUSTER, 0)[:length, :, None]
    rank = torch.rand((*number.shape[:2], CLUSTER), device=draw.device, generator=draw)
    key = number * CLUSTER + rank.topk(keep, dim=-1).indices
    return torch.where((number >= 0) & (key < length), key, -1).flatten(1)[None, None]


def lognormal_lengths(total: int, smallest: int, largest: int, seed: int) -> tuple[int, ...]:
    """Lengths that sum to ``total``: lognormal, their median midway between the bounds in logarithms,
    which lie two deviations off; what falls outside is drawn again.

    The last is cut to fit; a rest below ``smallest`` goes to the one before.

    >>> lognormal_lengths(1000, 16, 512, seed=0)
    (344, 70, 148, 35, 27, 128, 187, 61)
    """
    draw = torch.Generator().manual_seed(seed)
    low, high = math.log(smallest), math.log(largest)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = torch.randn((), generator=draw).item() * (high - low) / 4 + (low + high) / 2
        if not low <= drawn <= high:
            continue
        length = min(round(math.exp(drawn)), left)
        if length < smallest and lengths:
            lengths[-1] += length
        else:
            lengths.append(length)
    return tuple(lengths)
