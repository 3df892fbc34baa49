"""Long lists of tiles cut into pieces, each a list of its own.

A kernel gives a list to one program, which walks it alone. Of lists longer than the others the pieces
stand in slots: a piece is an equal run of its list's walk, partial tiles first. Slots are a fixed
number, so that nothing depends on what the device holds; a list for whose pieces none are left stays
whole, which takes longer and computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pieces(NamedTuple):
    """Counts of the lists that stay whole, 0 for those that are cut, as ``[B, H, R]`` twice; the lists of
    the pieces, counts ``[B, H, E]`` and indices ``[B, H, E, W]``, partial and full; of each slot its list
    ``owner [B, H, E]``, and ``parts [B, H, E]``: how many pieces begin there, 0 where none does."""

    partial_num: Tensor
    full_num: Tensor
    lists: list[Tensor]
    owner: Tensor
    parts: Tensor


def cut_lists(
    lists: Sequence[Tensor], longest: int, slots: int, *, but_last: bool = False
) -> Pieces:
    """Cuts lists (counts and indices of partial tiles, then of full) of more than ``longest`` tiles."""
    partial_num, partial_idx, full_num, full_idx = lists
    number = (partial_num + full_num).to(torch.int64)
    want = torch.where(number > longest, (number + longest - 1) // longest, 0)
    if but_last:
        want = torch.nn.functional.pad(want[..., :-1], (0, 1))
    ends = want.cumsum(-1)
    begin = ends - want
    cut = (want > 0) & (ends <= slots)
    slot = torch.arange(slots, device=number.device).expand(*number.shape[:2], -1).contiguous()
    owner = torch.searchsorted(ends, slot, right=True).clamp(max=number.shape[-1] - 1)
    used = cut.gather(-1, owner) & (slot < ends.gather(-1, owner))
    length, pieces = number.gather(-1, owner), want.gather(-1, owner).clamp(min=1)
    piece = slot - begin.gather(-1, owner)
    share = (length + pieces - 1) // pieces
    first = torch.where(used, (piece * share).minimum(length), 0)
    last = torch.where(used, ((piece + 1) * share).minimum(length), 0)
    partial = partial_num.to(torch.int64).gather(-1, owner)
    width = min(partial_idx.shape[-1], longest)
    return Pieces(
        partial_num.masked_fill(cut, 0),
        full_num.masked_fill(cut, 0),
        [
            *_run(partial_idx, owner, first.minimum(partial), last.minimum(partial), width),
            *_run(
                full_idx,
                owner,
                (first - partial).clamp(min=0),
                (last - partial).clamp(min=0),
                width,
            ),
        ],
        torch.where(used, owner, 0).to(torch.int32),
        torch.where(used & (piece == 0), pieces, 0).to(torch.int32),
    )


def _run(
    indices: Tensor, owner: Tensor, first: Tensor, last: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Entries ``first`` to ``last`` of the lists of ``owner``, as lists."""
    count = last - first
    step = torch.arange(width, device=indices.device)
    wide = indices.shape[-1]
    at = owner[..., None] * wide + (first[..., None] + step).clamp(max=wide - 1)
    found = indices.flatten(-2).gather(-1, at.flatten(-2)).view(at.shape)
    return count.to(torch.int32), torch.where(step < count[..., None], found, 0).contiguous()


def places(owner: Tensor, size: int, length: int) -> Tensor:
    """int32 ``[B, H, E * size]``: what stands in each slot of ``size``; past the end, the last."""
    at = owner[..., None] * size + torch.arange(size, dtype=torch.int32, device=owner.device)
    return at.clamp(max=length - 1).flatten(-2).contiguous()
