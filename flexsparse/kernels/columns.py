"""The tiles of each column from those of each row: what the gradients of keys and values walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.kernels.compress import compress
from flexsparse.kernels.rows import unpack_bits
from flexsparse.shapes import ceil_div

# Slots in 16 bytes. torch copies an input that begins elsewhere, at every call.
_ALIGNED = 4


class Room(NamedTuple):
    """How many rows a column can list: of its partial tiles, and of its full ones.

    Both stand in one line of slots, the partial ones first.
    """

    partial: int
    full: int

    @property
    def first_full(self) -> int:
        """The slot at which the full ones begin."""
        return _aligned(self.partial)

    @property
    def slots(self) -> int:
        return self.first_full + self.full

    def holds(self, needed: Room) -> bool:
        return needed.partial <= self.partial and needed.full <= self.full

    def grown(self, rows: int) -> Room:
        """A quarter more, in whole slots of 16 bytes; at least one, and of ``rows`` at most all."""
        return Room(*(min(rows, _aligned(max(1, n + n // 4))) for n in self))


class ColumnTiles(NamedTuple):
    """Counts ``[B, H, C]`` and rows ``[B, H, C, W]`` of partial tiles, then of full, and ``real
    [2, B, H, C]``: how many rows each column really has, None where all are listed.

    Each kind has room of its own, and yet their rows have the same strides, by which torch 2.11 reads
    both: see `side_by_side`. Where a degree is beyond the room, what did not fit is missing: whoever
    asked must ask again.
    """

    partial_num: Tensor
    partial_idx: Tensor
    full_num: Tensor
    full_idx: Tensor
    real: Tensor | None = None

    @property
    def degrees(self) -> Tensor:
        """``[2, B, H, C]``: how many rows each column really has, partial ones and full."""
        return torch.stack([self.partial_num, self.full_num]) if self.real is None else self.real

    @property
    def room(self) -> Room:
        return Room(self.partial_idx.shape[-1], self.full_idx.shape[-1])

    def needed(self) -> Room:
        """The most rows that any column really has. Reads the device."""
        partial, full = self.degrees.flatten(1).amax(1).tolist()
        return Room(partial, full)


def column_tiles(bits: Tensor, columns: int, room: Room) -> ColumnTiles:
    """``bits [2, B, H, R, ceil(C / 32)]`` as `row_tiles` gives them."""
    if bits.is_cuda:
        run = torch.ops.flexsparse.column_tiles if torch.compiler.is_compiling() else filled
        counts, slots = run(bits, columns, *room)
        num, degrees = counts.unbind(0)
        partial_num, full_num = num.unbind(0)
        partial_idx, full_idx = _split(slots, room)
        return ColumnTiles(partial_num, partial_idx, full_num, full_idx, degrees)
    partial, full = unpack_bits(bits, columns).transpose(-1, -2)
    degrees = torch.stack([partial, full]).sum(-1, dtype=torch.int32)
    partial_num, partial_idx = compress(partial, room.partial)
    full_num, full_idx = compress(full, room.full)
    partial_idx, full_idx = side_by_side(partial_idx, full_idx)
    return ColumnTiles(partial_num, partial_idx, full_num, full_idx, degrees)


def side_by_side(partial: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[B, H, C, W]``, of each kind as many, in one buffer: by the same strides."""
    room = Room(partial.shape[-1], full.shape[-1])
    before = torch.nn.functional.pad(partial, (0, room.first_full - room.partial))
    return _split(torch.cat([before, full], -1).contiguous(), room)


def moved(lists: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Lists by column, if any, on another device: still side by side."""
    found = [t.to(device) for t in lists]
    if found and found[1] is not lists[1]:
        found[1], found[3] = side_by_side(found[1], found[3])
    return found


def _split(slots: Tensor, room: Room) -> tuple[Tensor, Tensor]:
    return slots[..., : room.partial], slots[..., room.first_full :]


def _aligned(slots: int) -> int:
    return ceil_div(slots, _ALIGNED) * _ALIGNED


def filled(bits: Tensor, columns: int, partial: int, full: int) -> tuple[Tensor, Tensor]:
    """By the kernel: counts ``[2, 2, B, H, C]``, listed then real, and slots ``[B, H, C, W]``."""
    from flexsparse.kernels.triton_columns import launch

    return launch(bits, columns, Room(partial, full))


_operator = custom_op("flexsparse::column_tiles", filled, mutates_args=())


@_operator.register_fake
def _(bits: Tensor, columns: int, partial: int, full: int) -> tuple[Tensor, Tensor]:
    return buffers(bits, columns, Room(partial, full))


def buffers(bits: Tensor, columns: int, room: Room) -> tuple[Tensor, Tensor]:
    """What the kernel fills."""
    lists = bits.shape[1:3]
    return bits.new_empty((2, 2, *lists, columns)), bits.new_empty((*lists, columns, room.slots))
