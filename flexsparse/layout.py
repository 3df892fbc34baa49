"""The worktable: which tiles a kernel visits, by row and by column, and what it asks inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
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
from flexsparse.coverage import Coverage, Span, cover, every_tile
from flexsparse.errors import ArgumentError, EmptyRowError
from flexsparse.grid import Grid
from flexsparse.kernels import membership
from flexsparse.kernels.compress import compress, expand
from flexsparse.program import MaskProgram, mask_program
from flexsparse.rules import MaskMod, MaskRule, as_rule
from flexsparse.selection import Selection

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
class Layout:
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
        b = torch.arange(batch, device=device, dtype=torch.int32).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device, dtype=torch.int32).view(1, -1, 1, 1)
        q = rows.to(torch.int32).view(1, 1, -1, 1)
        kv = torch.arange(self.grid.kv_len, device=device, dtype=torch.int32).view(1, 1, 1, -1)
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
    if device is None:
        device = "cpu" if select is None else check_selection(select, grid, heads).indices.device
    return layout_at(
        address,
        grid,
        as_rule(rule),
        select,
        tile_size(block_size, "block_size"),
        check_fallback(fallback),
        check_empty(empty),
        sanitize,
        torch.device(device),
    )


def layout_at(
    address: Identity,
    grid: Grid,
    rule: MaskRule | None,
    select: Selection | None,
    block_size: tuple[int, int],
    reach: int | None,
    empty: Empty,
    sanitize: bool,
    device: torch.device,
    element: Element = Element(),
    dtype: torch.dtype = torch.float32,
) -> Layout:
    """The layout at an address."""
    program = mask_program(address, grid, rule, select, reach)
    return fill(program, grid, select, block_size, empty, sanitize, device, element, dtype)


def fill(
    program: MaskProgram,
    grid: Grid,
    select: Selection | None,
    block_size: tuple[int, int],
    empty: Empty,
    sanitize: bool,
    device: torch.device,
    element: Element = Element(),
    dtype: torch.dtype = torch.float32,
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
    lists = _lists(program, grid, occupied)
    nothing_seen = None
    if program.reach is not None and occupied is not None:
        # Who is empty without the fallback decides where the fallback counts.
        start = torch.zeros((*lists, grid.q_len), dtype=torch.bool, device=device)
        base = program.before_fallback(program.tables(grid, device, words, start, dtype))
        tiles = _tiles(occupied.expand(*lists, *span.tiles))
        nothing_seen = ~_rows(tiles, cover(base, tiles, span).queries, lists, span)
        occupied = occupied | _near(nothing_seen, address, grid, program.reach, span)
    tables = program.tables(grid, device, words, nothing_seen, dtype)
    if occupied is None:
        tiles = every_tile(*lists, span, device)
    else:
        tiles = _tiles(occupied.expand(*lists, *span.tiles))
    covered = cover(program.mod(tables), tiles, span)
    partial, full = _maps(tiles, covered, lists, span)
    kv_num, kv_idx = compress(partial)
    full_kv_num, full_kv_idx = compress(full)
    q_num, q_idx = compress(partial.transpose(-1, -2))
    full_q_num, full_q_idx = compress(full.transpose(-1, -2))
    has_empty_row = None
    if empty == "error":
        seen = _rows(tiles, covered.queries, lists, span)
        has_empty_row = ~seen.all()
        if not _on_device_only(device):
            _refuse_empty(seen, address, grid)
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
        seen_keys=_keys(tiles, covered.keys, lists, span, address) if sanitize else None,
        select=select,
        element=element,
        versions=program.versions(grid),
    )


def occupancy(select: Selection, span: Span) -> Tensor:
    """bool ``[B, H, R, C]``: the tiles that some candidate of some of their rows touches."""
    rows, columns = span.tiles
    device = select.indices.device
    row = torch.arange(select.rows, device=device)
    first_r = row * select.q_block // span.q_tile
    last_r = ((row + 1) * select.q_block - 1).clamp(max=span.q_len - 1) // span.q_tile
    chosen = select.indices.to(torch.int64)
    first_c = chosen * select.kv_block // span.kv_tile
    last_c = ((chosen + 1) * select.kv_block - 1).clamp(max=span.kv_len - 1) // span.kv_tile
    batch, heads = select.indices.shape[:2]
    # One tile past the last: unused slots write there.
    occupied = torch.zeros((batch, heads, rows * columns + 1), dtype=torch.bool, device=device)
    for i in range((select.q_block - 2) // span.q_tile + 2):
        r = (first_r + i)[:, None]
        for j in range((select.kv_block - 2) // span.kv_tile + 2):
            c = first_c + j
            inside = (chosen >= 0) & (r <= last_r[:, None]) & (c <= last_c)
            slot = torch.where(inside, r * columns + c, rows * columns)
            occupied.scatter_(-1, slot.flatten(2), True)
    return occupied[..., :-1].view(batch, heads, rows, columns)


def _lists(program: MaskProgram, grid: Grid, occupied: Tensor | None) -> tuple[int, int]:
    """How many batches and heads have lists of their own, in kernel coordinates."""
    address = program.address
    batch, heads = address.kernel_batch(grid.batch), address.kernel_heads[0]
    own_batch = program.uses_batch or batch != grid.batch
    own_heads = program.uses_head
    if occupied is not None:
        own_batch, own_heads = (
            own_batch or occupied.shape[0] > 1,
            own_heads or occupied.shape[1] > 1,
        )
    return batch if own_batch else 1, heads if own_heads else 1


def _on_device_only(device: torch.device) -> bool:
    """Whether the host must not look: inside torch.compile, or while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _tiles(occupied: Tensor) -> Tensor:
    """``[n, 4]``: the tiles to evaluate. Only those occupied, if the host may count them."""
    if _on_device_only(occupied.device):
        b, h, rows, columns = occupied.shape
        return every_tile(b, h, Span(rows, columns, 1, 1), occupied.device)
    return occupied.nonzero()


def _maps(
    tiles: Tensor, covered: Coverage, lists: tuple[int, int], span: Span
) -> tuple[Tensor, Tensor]:
    maps = torch.zeros((2, *lists, *span.tiles), dtype=torch.bool, device=tiles.device)
    at = tiles.unbind(1)
    # A tile in which nothing exists or nothing is allowed is not listed at all.
    maps[0].index_put_(at, (covered.visible > 0) & ~covered.full)
    maps[1].index_put_(at, (covered.visible > 0) & covered.full)
    return maps[0], maps[1]


def _rows(tiles: Tensor, queries: Tensor, lists: tuple[int, int], span: Span) -> Tensor:
    """bool ``[B, H, q_len]``: which queries see anything."""
    rows = span.tiles[0]
    seen = torch.zeros(
        (lists[0] * lists[1] * rows, span.q_tile), dtype=torch.int32, device=tiles.device
    )
    if len(tiles):
        b, h, r, _ = tiles.unbind(1)
        seen.index_add_(0, (b * lists[1] + h) * rows + r, queries.to(torch.int32))
    return seen.view(*lists, -1)[..., : span.q_len] > 0


def _keys(
    tiles: Tensor, keys: Tensor, lists: tuple[int, int], span: Span, address: Identity
) -> Tensor:
    """bool ``[B, Hkv, kv_len]`` in kernel coordinates: which keys anybody sees."""
    columns = span.tiles[1]
    seen = torch.zeros(
        (lists[0] * lists[1] * columns, span.kv_tile), dtype=torch.int32, device=tiles.device
    )
    if len(tiles):
        b, h, _, c = tiles.unbind(1)
        seen.index_add_(0, (b * lists[1] + h) * columns + c, keys.to(torch.int32))
    seen = seen.view(*lists, -1)[..., : span.kv_len] > 0
    kv_heads = address.kernel_heads[1]
    if lists[1] == 1:
        return seen.expand(-1, kv_heads, -1)
    return rearrange(seen, "b (g r) s -> b g r s", g=kv_heads).any(2)


def _near(empty: Tensor, address: Identity, grid: Grid, reach: int, span: Span) -> Tensor:
    """bool ``[B, H, R, C]``: tiles that hold the last ``reach`` keys of a query in ``empty``."""
    rows, columns = span.tiles
    position = grid.positions(empty.device)[:, None]
    if position.shape[0] > 1:
        position = address.lists(position, grid.batch)
    first = (position - reach + 1).clamp(min=0) // span.kv_tile
    last = position.clamp(max=span.kv_len - 1) // span.kv_tile
    row = torch.arange(span.q_len, device=empty.device) // span.q_tile
    near = torch.zeros(
        (*empty.shape[:2], rows * columns + 1), dtype=torch.bool, device=empty.device
    )
    for step in range((reach - 2) // span.kv_tile + 2):
        column = first + step
        slot = torch.where(
            empty & (position >= 0) & (column <= last), row * columns + column, rows * columns
        )
        near.scatter_(-1, slot, True)
    return near[..., :-1].view(*empty.shape[:2], rows, columns)


def _refuse_empty(seen: Tensor, address: Identity, grid: Grid) -> None:
    if bool(seen.all()):
        return
    entry, lane, query = (~seen).nonzero()[0].unbind()
    b, h, _, _ = address.logical(entry, lane, query, query)
    raise EmptyRowError(
        f"query {int(query)} of batch {int(b)}, head {int(h)} sees no key, and empty='error': allow it "
        "one by rule, selection or fallback='self', or let it give zero with empty='zero'"
    )
