"""The worktable: which tiles a kernel visits, by row and by column, and what it asks inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flexsparse.address import Identity
from flexsparse.ahead import Element
from flexsparse.arguments import check_device
from flexsparse.coverage import Span
from flexsparse.cutting import Cuts, Launches, launches_of
from flexsparse.device import lasting
from flexsparse.errors import LayoutError
from flexsparse.grid import Grid
from flexsparse.kernels import membership
from flexsparse.kernels.columns import ColumnTiles, Room, column_tiles, moved
from flexsparse.kernels.compress import expand
from flexsparse.kernels.tile_bits import tile_bits
from flexsparse.listed import visible_pairs
from flexsparse.occupancy import kernel_span, logical_span
from flexsparse.ordering import Order
from flexsparse.program import MaskProgram
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.shown import Shown
from flexsparse.trees import register
from flexsparse.versions import Versions, Writes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from flexsparse.budget import Budget


@register
@dataclass(frozen=True, eq=False, repr=False)
class Layout(Shown):
    """Tiles of ``block_size`` in kernel coordinates: those to be masked inside, and the full ones.

    ``kv_num_blocks [B, H, R]`` says how many of ``kv_indices [B, H, R, W]`` row r visits and masks;
    the ``full_`` lists need no mask. ``columns`` are the same tiles by column, for gradients of keys
    and values; None where a plan needs none. B and H are 1 where all batches or heads share their
    lists, W is the most that a row can hold. All int32, rising, contiguous but for the rows of columns,
    of which both kinds stand side by side. ``launches`` are the same tiles as kernels are given them
    where long rows and columns are ``cuts`` into pieces; ``order`` is that of rows where they are not as
    they were.
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
    columns: ColumnTiles | None
    has_empty_row: Tensor | None
    seen_keys: Tensor | None
    select: Selection | None
    element: Element
    # Of what the rule reads, as it was looked at; and of all that the tiles depend on.
    read: Versions
    versions: Versions
    # Shared by all that share its lists.
    writes: Writes
    cuts: Cuts | None = None
    launches: Launches | None = None
    order: Order | None = None

    @property
    def span(self) -> Span:
        return kernel_span(self.address, self.grid, self.block_size)

    @property
    def logical_span(self) -> Span:
        """The same tiles, counted in queries instead of kernel rows."""
        return logical_span(self.address, self.grid, self.block_size)

    @property
    def by_row(self) -> list[Tensor]:
        """The four lists by row, in torch's order."""
        return [
            self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices
        ]  # fmt: skip

    @property
    def lists(self) -> list[Tensor]:
        """The four lists by row and, where there are, the four by column, in torch's order."""
        return self.by_row if self.columns is None else [*self.by_row, *self.columns[:4]]

    @cached_property
    def form(self) -> tuple[object, ...]:
        """Sizes of tiles, lists and tables, by which its kernel is known, how they lie in memory, and what
        else there is of it."""
        tables = [(t.shape, t.stride(), t.dtype) for t in self.tables]
        parts = (self.has_empty_row, self.seen_keys, self.launches, self.order)
        there = [part is not None for part in parts]
        sizes = [part for x in self.lists for part in (x.shape, x.stride())]
        return (self.kv_indices.device, *there, self.block_size, *sizes, *tables)

    @cached_property
    def read_forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """What a kernel reads of it where no gradients are wanted: lists by row, and tables."""
        return self.by_row, [t.detach() for t in self.tables]

    def __getstate__(self) -> dict[str, Any]:
        # What was found of it once is found anew of a copy, whose tensors are others.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def mask_mod(self) -> MaskMod:
        """Rule, membership and fallback, right wherever it is asked, listed tiles or not."""
        self.refuse_outdated()
        tables = self.tables
        if self.select is not None and not self.program.asks_member(self.block_size):
            # Kernels do without: the lists say it. Whoever goes around the lists cannot.
            words = membership.pack(self.select.indices, self.select.candidates)
            at = self.program.words_at
            tables = [*tables[:at], words, *tables[at + 1 :]]
        return self.program.mod(tables)

    def refuse_outdated(self) -> None:
        """Raises `LayoutError` where a tensor has changed that the tiles depend on."""
        if not self.versions.current:
            raise LayoutError(
                "a tensor of the rule, q_offset or selection has changed since this layout was made, or the "
                "layout that its lists are of was written anew, and its tiles with that: make it anew, with "
                "plan.layout, plan.chunk or build_layout"
            )

    def stands(self, read: Versions) -> bool:
        """Whether it was made from just this look at what the rule reads, and is current."""
        return self.read is read and self.versions.current

    @property
    def block_mask(self) -> BlockMask:
        """torch's BlockMask: its mask_mod holds rule, membership and fallback, so that a kernel
        that ignores the lists is still right. It shares lists that are as wide as there are tiles:
        ask for another once this layout is written anew."""
        whole = self.with_columns() if self.may_lack_rows else self
        lists = widened(whole.lists, self.span)
        return as_block_mask(lists, self.span[:2], self.block_size, self.mask_mod)

    @property
    def may_lack_rows(self) -> bool:
        """Whether columns have less room than there are rows, which some selection may need."""
        cut = self.columns is not None and min(self.columns.room) < self.span.tiles[0]
        return cut and self.select is not None

    def tile_maps(self) -> tuple[Tensor, Tensor]:
        """bool ``[B, H, R, C]`` twice: the tiles masked inside, and the full ones."""
        columns = self.span.tiles[1]
        return (
            expand(self.kv_num_blocks, self.kv_indices, columns),
            expand(self.full_kv_num_blocks, self.full_kv_indices, columns),
        )

    @lasting
    def with_columns(self, room: Room | None = None) -> Layout:
        """The layout with its lists by column, with ``room`` for so many rows, by default for all."""
        rows, columns = self.span.tiles
        bits = tile_bits(self.by_row, columns)
        room = Room(rows, rows) if room is None else room
        return replace(self, columns=column_tiles(bits, columns, room)).cut(self.cuts)

    @lasting
    def cut(self, cuts: Cuts | None) -> Layout:
        """The layout with its long rows and columns cut so, None for not at all."""
        launches = None
        if cuts is not None:
            launches = launches_of(self.by_row, self.columns, cuts, self.span)
        return replace(self, cuts=cuts, launches=launches)

    @property
    def logical_pairs(self) -> Tensor:
        """0-d int64: the pairs that rule and selection allow, over batch and query heads."""
        partial, full = self.lists[0:2], self.lists[2:4]
        batch, heads = self.address.kernel_batch(self.grid.batch), self.address.kernel_heads[0]
        lists = self.kv_num_blocks.shape
        sharing = (batch // lists[0]) * (heads // lists[1])
        return visible_pairs(self.mask_mod, partial, full, self.span) * sharing

    def dense(self, rows: Tensor | None = None) -> Tensor:
        """What the tiles amount to, pair by pair, in logical axes ``[B, Hq, n, S]``."""
        device = self.kv_indices.device
        rows = torch.arange(self.grid.q_len, device=device) if rows is None else rows
        b = torch.arange(self.grid.batch, device=device).view(-1, 1, 1)
        h = torch.arange(self.heads[0], device=device).view(1, -1, 1)
        entry, lane, row = torch.broadcast_tensors(*self.address.kernel(b, h, rows.view(1, 1, -1)))
        kv = torch.arange(self.grid.kv_len, device=device)
        if self.order is not None:
            inverse = self.order.inverse
            row = inverse[entry % inverse.shape[0], lane % inverse.shape[1], row].to(torch.int64)
        masked = self.mask_mod(entry[..., None], lane[..., None], row[..., None], kv)
        partial, full = (
            m[entry % m.shape[0], lane % m.shape[1], row // self.block_size[0]]
            .repeat_interleave(self.block_size[1], -1)[..., : self.grid.kv_len]
            for m in self.tile_maps()
        )  # fmt: skip
        return (partial & masked) | full

    def budget(self) -> Budget:
        """What the algorithm asked for, and what a kernel that visits these tiles touches, each head by
        itself; counted without a clock. Made without tensors, flops and bytes assume head dims of 128 and 2
        bytes a number, and ``print`` says so.

        A layout knows no backend. Those that gather keys, compute all pairs or walk a list for several
        heads at once touch something else: `Result.budget` and `Plan.budget` count what was run.
        """
        from flexsparse.budget import count

        return count(self)

    def to(self, device: torch.device | str) -> Layout:
        """The layout with everything it reads, captured tensors too, on ``device``."""
        device = check_device(device)
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Selection)
        }
        columns = launches = None
        if self.columns is not None:
            real = None if self.columns.real is None else self.columns.real.to(device)
            columns = ColumnTiles._make([*moved(self.columns[:4], device), real])
        if self.launches is not None:
            launches = self.launches.to(device)
        tables = [t.to(device) for t in self.tables]
        order = tree_map_only(Tensor, lambda t: t.to(device), self.order)
        writes, versions = self.writes, self.versions
        if tensors["kv_num_blocks"] is not self.kv_num_blocks:
            writes = Writes()
            versions = versions.instead(self.writes, writes)
        return replace(
            self, **tensors, tables=tables, columns=columns, launches=launches, order=order,
            writes=writes, versions=versions,
        )  # fmt: skip

    def __repr__(self) -> str:
        b, h = self.kv_indices.shape[:2]
        r, c = self.span.tiles
        return (
            f"Layout([{b}, {h}, {r}, {c}] tiles of {self.block_size[0]}x{self.block_size[1]}, "
            f"{self.grid}, {self.address})"
        )


def widened(lists: Sequence[Tensor], span: Span) -> list[Tensor]:
    """Contiguous lists as wide as there are tiles to list, as torch's own helpers expect them."""
    rows, columns = span.tiles
    found = list(lists)
    for i in range(1, len(found), 2):
        missing = (columns if i < 4 else rows) - found[i].shape[-1]
        wide = torch.nn.functional.pad(found[i], (0, missing)) if missing else found[i]
        found[i] = wide.contiguous()
    return found


def as_block_mask(
    lists: Sequence[Any],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    mask_mod: MaskMod,
) -> BlockMask:
    """torch's BlockMask of eight lists, or of the four by row where no gradient is wanted."""
    from torch.nn.attention.flex_attention import BlockMask

    by_column = lists[4:] if len(lists) > 4 else (None,) * 4

    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=lists[0],
        kv_indices=lists[1],
        full_kv_num_blocks=lists[2],
        full_kv_indices=lists[3],
        q_num_blocks=by_column[0],
        q_indices=by_column[1],
        full_q_num_blocks=by_column[2],
        full_q_indices=by_column[3],
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )
