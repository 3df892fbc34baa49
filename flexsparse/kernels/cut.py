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
from torch.library import custom_op


class Laid(NamedTuple):
    """What a list stands for, rows or keys: ``size`` of them in a tile, ``length`` in all."""

    size: int
    length: int


class Pieces(NamedTuple):
    """Counts of the lists that stay whole, 0 for those that are cut, as ``[B, H, R]`` twice; the lists of
    the pieces, counts ``[B, H, E]`` and indices ``[B, H, E, W]``, partial and full; of each slot its list
    ``owner [B, H, E]``, and ``parts [B, H, E]``: how many pieces begin there, 0 where none does; and
    ``place [B, H, E * size]``, the rows or keys of each slot's list: past the end, the last."""

    partial_num: Tensor
    full_num: Tensor
    lists: list[Tensor]
    owner: Tensor
    parts: Tensor
    place: Tensor


def cut_lists(
    lists: Sequence[Tensor], longest: int, slots: int, laid: Laid, *, but_last: bool = False
) -> Pieces:
    """Cuts lists (counts and indices of partial tiles, then of full) of more than ``longest`` tiles.

    ``but_last`` leaves the last list whole.
    """
    if not lists[0].is_cuda:
        return by_torch(lists, longest, slots, laid, but_last=but_last)
    run = torch.ops.flexsparse.cut_lists if torch.compiler.is_compiling() else filled
    whole, of_slots, found, place = run(list(lists), longest, slots, list(laid), but_last)
    partial_num, full_num = whole.unbind(0)
    partial, full, owner, parts = of_slots.unbind(0)
    partial_idx, full_idx = found.unbind(0)
    pieces = [partial, partial_idx, full, full_idx]
    return Pieces(partial_num, full_num, pieces, owner, parts, place)


def width_of(lists: Sequence[Tensor], longest: int) -> int:
    """The most tiles of a kind that a piece can hold: as torch asks, of both kinds the same."""
    return min(max(lists[1].shape[-1], lists[3].shape[-1]), longest)


def by_torch(
    lists: Sequence[Tensor], longest: int, slots: int, laid: Laid, *, but_last: bool = False
) -> Pieces:
    """The specification of the kernel."""
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
    width = width_of(lists, longest)
    held = torch.where(used, owner, 0).to(torch.int32)
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
        held,
        torch.where(used & (piece == 0), pieces, 0).to(torch.int32),
        _places(held, laid),
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


def _places(owner: Tensor, laid: Laid) -> Tensor:
    step = torch.arange(laid.size, dtype=torch.int32, device=owner.device)
    at = owner[..., None] * laid.size + step
    return at.clamp(max=laid.length - 1).flatten(-2).contiguous()


def filled(
    lists: list[Tensor], longest: int, slots: int, laid: list[int], but_last: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By the kernel: counts of whole lists ``[2, B, H, R]``; counts, owners and parts of slots ``[4, B, H, E]``;
    indices ``[2, B, H, E, W]``; and places."""
    from flexsparse.kernels.triton_cut import launch

    return launch(lists, longest, slots, Laid(*laid), but_last=but_last)


_operator = custom_op("flexsparse::cut_lists", filled, mutates_args=())


@_operator.register_fake
def _(
    lists: list[Tensor], longest: int, slots: int, laid: list[int], but_last: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return buffers(lists, longest, slots, Laid(*laid))


def buffers(
    lists: Sequence[Tensor], longest: int, slots: int, laid: Laid
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernel fills."""
    num = lists[0]
    of = num.shape[:2]
    return (
        num.new_empty((2, *num.shape)),
        num.new_empty((4, *of, slots)),
        num.new_empty((2, *of, slots, width_of(lists, longest))),
        num.new_empty((*of, slots * laid.size)),
    )
