"""What a layout costs, counted without a clock: logical work beside physical work, in pairs and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsparse.shapes import ceil_div
from flexsparse.shown import Shown

if TYPE_CHECKING:
    from flexsparse.layout import Layout


@dataclass(frozen=True)
class Rows:
    """Tiles visited by a row of tiles, over all that the kernel has."""

    min: int
    median: int
    p99: int
    max: int


@dataclass(frozen=True)
class Sharing:
    """The same candidates if all heads shared one list, each KV head had one, or each query head."""

    shared: int
    per_kv_head: int
    per_query_head: int


@dataclass(frozen=True)
class Budget(Shown):
    """Counts over batch and query heads. A pair is one query with one key.

    ``logical_pairs`` is what rule and selection allow; ``physical_pairs`` is tiles times tile area,
    what a kernel computes; their ratio is the ``inflation``: partial tiles that hold few of their
    pairs, as where queries of one tile want different keys, and tiles that hang over the lengths, as
    all do when decoding one query. A tile whose rows are heads as well counts once. ``kv_bytes`` is what visiting the tiles
    reads of K and V if heads that share a list share the reading, ``metadata_bytes`` the lists and
    tables; ``kv_bytes_if`` and ``metadata_bytes_if`` put the three ways to share side by side.
    """

    logical_pairs: int
    dense_pairs: int
    physical_tiles: int
    full_tiles: int
    partial_tiles: int
    physical_pairs: int
    kv_bytes: int
    metadata_bytes: int
    useful_flops: int
    executed_flops: int
    rows: Rows
    kv_bytes_if: Sharing
    metadata_bytes_if: Sharing

    @property
    def inflation(self) -> float:
        """Physical over logical pairs; 1 where the hardware does what was asked and no more."""
        if self.logical_pairs == 0:
            return float("inf") if self.physical_pairs else 1.0
        return self.physical_pairs / self.logical_pairs

    @property
    def density(self) -> float:
        """Logical pairs over all pairs of the grid."""
        return self.logical_pairs / self.dense_pairs

    def __str__(self) -> str:
        ways, lists = self.kv_bytes_if, self.metadata_bytes_if
        return "\n".join(
            [
                f"logical   {self.logical_pairs:,} pairs ({self.density:.1%} of dense), "
                f"{self.useful_flops:,} flops",
                f"physical  {self.physical_pairs:,} pairs in {self.physical_tiles:,} tiles "
                f"({self.full_tiles:,} full, {self.partial_tiles:,} partial), "
                f"{self.executed_flops:,} flops",
                f"inflation {self.inflation:.2f}",
                f"rows      {self.rows.min} min, {self.rows.median} median, {self.rows.p99} p99, "
                f"{self.rows.max} max tiles",
                f"bytes     {self.kv_bytes:,} of K and V, {self.metadata_bytes:,} of metadata",
                f"if shared {ways.shared:,} + {lists.shared:,}; per KV head {ways.per_kv_head:,} + "
                f"{lists.per_kv_head:,}; per query head {ways.per_query_head:,} + "
                f"{lists.per_query_head:,}",
            ]
        )


def count(layout: Layout) -> Budget:
    """The budget of a layout. Reads the device."""
    address, grid, element = layout.address, layout.grid, layout.element
    heads, kv_heads = address.heads, address.kv_heads
    batch = address.kernel_batch(grid.batch)
    partial, full = (
        counts.expand(batch, address.kernel_heads[0], -1)
        for counts in (layout.kv_num_blocks, layout.full_kv_num_blocks)
    )
    visited = partial + full  # in kernel coordinates, [B, H, R]
    area = layout.block_size[0] * layout.block_size[1]
    tiles, full_tiles = int(visited.sum()), int(full.sum())
    pair_flops = 2 * (element.head_dim + element.v_head_dim)
    tile_bytes = layout.block_size[1] * (element.head_dim + element.v_head_dim) * element.itemsize
    pairs = int(layout.logical_pairs)
    lists = Sharing(1, kv_heads, heads)
    reads = _reads(layout, tiles)
    rows, columns = layout.span.tiles
    list_bytes = 4 * 2 * (rows * (layout.kv_indices.shape[-1] + 1))
    if layout.columns is not None:
        list_bytes += 4 * 2 * (columns * (layout.columns.partial_idx.shape[-1] + 1))
    kept = _list_heads(layout)
    read = {1: reads.shared, kv_heads: reads.per_kv_head, heads: reads.per_query_head}[kept]
    metadata = sum(t.numel() * t.element_size() for t in [*layout.lists, *layout.tables])
    word_bytes = _membership_bytes(layout)
    return Budget(
        logical_pairs=pairs,
        dense_pairs=grid.batch * heads * grid.q_len * grid.kv_len,
        physical_tiles=tiles,
        full_tiles=full_tiles,
        partial_tiles=tiles - full_tiles,
        physical_pairs=tiles * area,
        kv_bytes=read * tile_bytes,
        metadata_bytes=metadata,
        useful_flops=pairs * pair_flops,
        executed_flops=tiles * area * pair_flops,
        rows=_spread(visited.flatten()),
        kv_bytes_if=Sharing(*(n * tile_bytes for n in vars(reads).values())),
        metadata_bytes_if=Sharing(
            *(n * grid.batch * (list_bytes + word_bytes) for n in vars(lists).values())
        ),
    )


def _reads(layout: Layout, tiles: int) -> Sharing:
    """How often a tile of keys is read if heads share their lists, and so what any of them visits."""
    address, grid = layout.address, layout.grid
    # A tile whose rows are heads too would be visited for each of them.
    per_query_head = tiles * address.rows_per_query
    if _list_heads(layout) == 1:
        shared = per_query_head // address.heads * address.kv_heads
        return Sharing(shared=shared, per_kv_head=shared, per_query_head=per_query_head)
    partial, full = layout.tile_maps()
    batch, heads = address.kernel_batch(grid.batch), address.kernel_heads[0]
    visited = (partial | full).expand(batch, heads, -1, -1)
    group = visited.reshape(grid.batch, address.kv_heads, -1, *visited.shape[2:])
    return Sharing(
        shared=int(group.flatten(1, 2).any(1).sum()) * address.kv_heads,
        per_kv_head=int(group.any(2).sum()),
        per_query_head=per_query_head,
    )


def _list_heads(layout: Layout) -> int:
    """How many lists a sequence has: 1, one a KV head, or one a query head."""
    lists = layout.kv_num_blocks.shape[1]
    if layout.address.kernel_batch(1) == 1:
        return lists
    return layout.address.kv_heads * lists


def _membership_bytes(layout: Layout) -> int:
    """Bytes of one list's membership words."""
    if layout.select is None or not layout.program.asks_member(layout.block_size):
        return 0
    return 4 * ceil_div(layout.select.rows, 32) * layout.select.candidates


def _spread(work: Tensor) -> Rows:
    ordered = work.sort().values
    last = len(ordered) - 1
    at = [0, last // 2, round(0.99 * last), last]
    return Rows(*(int(ordered[i]) for i in torch.tensor(at)))
