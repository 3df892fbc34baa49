"""The worktable: which tiles a kernel visits, by row and by column, and what it asks inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.arguments import (
    Empty,
    Fallback,
    check_empty,
    check_fallback,
    check_heads,
    check_selection,
    tile_size,
)
from flexsparse.coverage import Span, cover, every_tile
from flexsparse.errors import ArgumentError, RuleError
from flexsparse.grid import Grid
from flexsparse.kernels import membership
from flexsparse.kernels.compress import compress, expand
from flexsparse.occupancy import (
    list_axes,
    near,
    occupancy,
    on_device_only,
    refuse_empty,
    seeing_rows,
    seen_keys_of,
    tile_maps_of,
    tiles_of,
)
from flexsparse.program import MaskProgram, mask_program
from flexsparse.rules import MaskMod, as_rule
from flexsparse.selection import Selection
from flexsparse.shown import Shown

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from flexsparse.budget import Budget


@dataclass(frozen=True)
class Element:
    """What one key costs: its head dims and the bytes of a number."""

    head_dim: int = 128
    v_head_dim: int = 128
    itemsize: int = 2


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Shown):
    """Tiles of ``block_size`` in kernel coordinates: those to be masked inside, and the full ones.

    ``kv_num_blocks [B, H, R]`` says how many of ``kv_indices [B, H, R, C]`` row r visits and masks;
    the ``full_`` lists need no mask; the ``q_`` lists are the same tiles by column. B and H are 1
    where all batches or heads share their lists. All int32, contiguous, rising.
    """

    grid: Grid
    heads: tuple[int, int]
    block_size: tuple[int, int]
    address: Identity
    program: MaskProgram
    tables: list[Tensor]
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor
    logical_pairs: Tensor
    has_empty_row: Tensor | None
    seen_keys: Tensor | None
    select: Selection | None
    element: Element
    versions: tuple[int, ...]

    @property
    def span(self) -> Span:
        return Span(self.grid.q_len, self.grid.kv_len, *self.block_size)

    @property
    def lists(self) -> list[Tensor]:
        """The eight lists, in torch's order."""
        return [
            self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices,
            self.q_num_blocks, self.q_indices, self.full_q_num_blocks, self.full_q_indices,
        ]  # fmt: skip

    @property
    def block_mask(self) -> BlockMask:
        """torch's BlockMask: its mask_mod holds rule, membership and fallback, so that a kernel
        that ignores the lists is still right."""
        lengths = (self.grid.q_len, self.grid.kv_len)
        return as_block_mask(self.lists, lengths, self.block_size, self.program.mod(self.tables))

    def tile_maps(self) -> tuple[Tensor, Tensor]:
        """bool ``[B, H, R, C]`` twice: the tiles masked inside, and the full ones."""
        return (
            expand(self.kv_num_blocks, self.kv_indices),
            expand(self.full_kv_num_blocks, self.full_kv_indices),
        )

    def dense(self, rows: Tensor | None = None) -> Tensor:
        """What the tiles amount to, pair by pair, in logical axes ``[B, Hq, n, S]``."""
        device = self.kv_indices.device
        rows = torch.arange(self.grid.q_len, device=device) if rows is None else rows
        batch, (heads, _) = self.address.kernel_batch(self.grid.batch), self.address.kernel_heads
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(1, -1, 1, 1)
        q = rows.view(1, 1, -1, 1)
        kv = torch.arange(self.grid.kv_len, device=device).view(1, 1, 1, -1)
        masked = self.program.mod(self.tables)(b, h, q, kv)
        partial, full = (
            m[:, :, rows // self.block_size[0]]
            .repeat_interleave(self.block_size[1], -1)[..., : self.grid.kv_len]
            for m in self.tile_maps()
        )  # fmt: skip
        seen = (partial & masked) | full
        seen = seen.expand(batch, heads, len(rows), self.grid.kv_len)
        return self.address.unpack(seen, self.grid.batch)

    def budget(self) -> Budget:
        """What the algorithm asked for and what a kernel touches, counted without a clock."""
        from flexsparse.budget import count

        return count(self)

    def to(self, device: torch.device | str) -> Layout:
        """The layout with everything it reads, captured tensors too, on ``device``."""

        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Selection)
        }
        return replace(self, **tensors, tables=[t.to(device) for t in self.tables])

    def __repr__(self) -> str:
        b, h, r, c = self.kv_indices.shape
        return (
            f"Layout([{b}, {h}, {r}, {c}] tiles of {self.block_size[0]}x{self.block_size[1]}, "
            f"{self.grid}, {self.address})"
        )


def as_block_mask(
    lists: Sequence[Any],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    mask_mod: MaskMod,
) -> BlockMask:
    """torch's BlockMask of eight lists; the last four may be None where no gradient is wanted."""
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=lists[0],
        kv_indices=lists[1],
        full_kv_num_blocks=lists[2],
        full_kv_indices=lists[3],
        q_num_blocks=lists[4],
        q_indices=lists[5],
        full_q_num_blocks=lists[6],
        full_q_indices=lists[7],
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )


def build_layout(
    *,
    rule: MaskMod | None = None,
    select: Selection | None = None,
    grid: Grid,
    heads: tuple[int, int],
    block_size: int | tuple[int, int] = (128, 128),
    fallback: Fallback = None,
    empty: Empty = "zero",
    sanitize: bool = False,
    device: torch.device | str | None = None,
) -> Layout:
    """Rule and selection as tiles, with logical heads as they are.

    ``heads`` is ``(Hq, Hkv)``; ``block_size`` any size from 16 up, ``(query, key)``. The layout lives
    on ``device``, by default the selection's.
    """
    if not isinstance(grid, Grid):
        raise ArgumentError(f"grid must be a Grid(q_len, kv_len), got {type(grid).__name__}")
    address = Identity(*check_heads(heads))
    if select is not None:
        select = check_selection(select, grid, heads)
    if device is None:
        device = "cpu" if select is None else select.indices.device
    reach, empty = check_fallback(fallback), check_empty(empty)
    tiles = tile_size(block_size, "block_size")
    program = mask_program(address, grid, as_rule(rule), select, reach)
    return fill(program, grid, select, tiles, empty, sanitize, torch.device(device))


def fill(
    program: MaskProgram,
    grid: Grid,
    select: Selection | None,
    block_size: tuple[int, int],
    empty: Empty,
    sanitize: bool,
    device: torch.device,
    element: Element = Element(),
) -> Layout:
    """The layout of a program for one selection: device work only."""
    address = program.address
    span = Span(grid.q_len, grid.kv_len, *block_size)
    words = None
    occupied = None
    if select is not None:
        check_selection(select, grid, (address.heads, address.kv_heads))
        words = membership.pack(select.indices, select.candidates)
        occupied = address.lists(occupancy(select, span), grid.batch)
    lists = list_axes(program, grid, occupied)
    nothing_seen = None
    if program.reach is not None and occupied is not None:
        # Who is empty without the fallback decides where the fallback counts.
        start = torch.zeros((*lists, grid.q_len), dtype=torch.bool, device=device)
        base = program.before_fallback(program.tables(grid, device, words, start))
        tiles = tiles_of(occupied.expand(*lists, *span.tiles))
        nothing_seen = ~seeing_rows(tiles, cover(base, tiles, span).queries, lists, span)
        occupied = occupied | near(nothing_seen, address, grid, program.reach, span)
    tables = program.tables(grid, device, words, nothing_seen)
    if occupied is None:
        tiles = every_tile(*lists, span, device)
    else:
        tiles = tiles_of(occupied.expand(*lists, *span.tiles))
    try:
        covered = cover(program.mod(tables), tiles, span)
    except (IndexError, RuntimeError) as error:
        divides = "ZeroDivision" in str(error)
        if not divides and not isinstance(error, IndexError):
            raise
        name = program.rule.name if program.rule else "the mask"
        what = "divides by zero" if divides else "reads a table past its end"
        raise RuleError(f"{name} {what}: {error}") from error
    partial, full = tile_maps_of(tiles, covered, lists, span)
    kv_num, kv_idx = compress(partial)
    full_kv_num, full_kv_idx = compress(full)
    q_num, q_idx = compress(partial.transpose(-1, -2))
    full_q_num, full_q_idx = compress(full.transpose(-1, -2))
    has_empty_row = None
    if empty == "error":
        seen = seeing_rows(tiles, covered.queries, lists, span)
        has_empty_row = ~seen.all()
        if not on_device_only(device):
            refuse_empty(seen, address, grid)
    sharing = (address.kernel_batch(grid.batch) // lists[0]) * (address.kernel_heads[0] // lists[1])
    return Layout(
        grid=grid,
        heads=(address.heads, address.kv_heads),
        block_size=block_size,
        address=address,
        program=program,
        tables=tables,
        kv_num_blocks=kv_num,
        kv_indices=kv_idx,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv_idx,
        q_num_blocks=q_num,
        q_indices=q_idx,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q_idx,
        logical_pairs=covered.visible.sum() * sharing,
        has_empty_row=has_empty_row,
        seen_keys=seen_keys_of(tiles, covered.keys, lists, span, address) if sanitize else None,
        select=select,
        element=element,
        versions=program.versions(grid),
    )
