"""What attention costs, counted without a clock: logical work beside physical work, in pairs and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from flexsparse.ahead import Element
from flexsparse.kernels import membership
from flexsparse.shapes import ceil_div
from flexsparse.shown import Shown

if TYPE_CHECKING:
    from flexsparse.layout import Layout


Counted = Literal["tiles", "keys", "pairs"]


@dataclass(frozen=True)
class Rows:
    """Tiles visited by a row of tiles, over all that the kernel has; where no tile is visited, keys read
    for a query."""

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
    """Counts over batch and query heads, of a forward. A pair is one query with one key.

    ``logical_pairs`` is what rule and selection allow; ``physical_pairs`` is what a kernel computes, by
    what its work is ``counted`` in:

    - ``tiles``: tiles times tile area. A tile whose rows are heads as well counts once.
    - ``keys`` gathered for each query: all those of its candidates, whole blocks, and of its fallback,
      once for each query head that shares the reading.
    - ``pairs`` of dense attention: all of them, and where torch's causal kernel runs those up to the
      diagonal; what its own tiles add there is not known.

    Their ratio is the ``inflation``: partial tiles that hold few of their pairs, as where queries of one
    tile want different keys, and tiles that hang over the lengths, as all do when decoding one query;
    keys of a block that the rule hides. ``kv_bytes`` is what visiting the tiles, or gathering the keys,
    reads of K and V if heads that share a list share the reading; dense attention reads each head's K and
    V at least once. Flops and bytes count with the head dims and bytes a number of the call's tensors; where
    a layout was made without any, as by `build_layout`, with the ``assumed`` ones. ``metadata_bytes`` are the lists and tables, or indices, or mask; ``kv_bytes_if`` and
    ``metadata_bytes_if`` put the three ways to share side by side.
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
    counted: Counted = "tiles"
    assumed: Element | None = None
    """Head dims and bytes a number that no tensor gave: 128, 128 and 2."""

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
        within, each = {
            "tiles": (
                f"in {self.physical_tiles:,} tiles ({self.full_tiles:,} full, "
                f"{self.partial_tiles:,} partial)",
                "tiles a row of tiles",
            ),
            "keys": ("with keys gathered for each query", "keys a query"),
            "pairs": ("of dense attention", "keys a query"),
        }[self.counted]
        taken = []
        if (size := self.assumed) is not None:
            taken = [
                f"assumed   head dims {size.head_dim} of K and {size.v_head_dim} of V, {size.itemsize} bytes a "
                "number, for flops and bytes: no tensor gave them (a plan's budget has its tensors')"
            ]
        return "\n".join(
            [
                f"logical   {self.logical_pairs:,} pairs ({self.density:.1%} of all pairs), "
                f"{self.useful_flops:,} flops",
                f"physical  {self.physical_pairs:,} pairs {within}, {self.executed_flops:,} flops",
                f"inflation {self.inflation:.2f}",
                f"rows      {self.rows.min} min, {self.rows.median} median, {self.rows.p99} p99, "
                f"{self.rows.max} max {each}",
                f"bytes     {self.kv_bytes:,} of K and V, {self.metadata_bytes:,} of metadata",
                f"if lists were shared by all heads {ways.shared:,} + {lists.shared:,}; per KV head {ways.per_kv_head:,} + "
                f"{lists.per_kv_head:,}; per query head {ways.per_query_head:,} + "
                f"{lists.per_query_head:,}",
                *taken,
            ]
        )


class Together(NamedTuple):
    """Of a kernel that walks a list once for several ``heads``, whose queries are all in a tile's
    ``rows``."""

    heads: int
    rows: int


class Touched(NamedTuple):
    """What a way to compute a layout touches: physical pairs, keys it reads of K and V, and if lists were
    shared in each of three ways, and how much for each row; its metadata, and those of one list of a
    sequence; tiles, and how many of them are full."""

    counted: Counted
    pairs: int
    keys: int
    keys_if: Sharing
    rows: Rows
    metadata: int
    list_bytes: int
    tiles: int = 0
    full_tiles: int = 0


def count(layout: Layout, together: Together | None = None) -> Budget:
    """The budget of a layout's tiles, by a kernel that visits them. Reads the device.

    ``together`` where it walks a list for several heads at once, else each head has tiles of its own.
    """
    address, grid = layout.address, layout.grid
    heads, kv_heads = address.heads, address.kv_heads
    batch = address.kernel_batch(grid.batch)
    partial, full = (
        counts.expand(batch, address.kernel_heads[0], -1)
        for counts in (layout.kv_num_blocks, layout.full_kv_num_blocks)
    )
    visited = partial + full  # in kernel coordinates, [B, H, R]
    tiles, full_tiles = int(visited.sum()), int(full.sum())
    reads = _reads(layout, tiles)
    rows, columns = layout.span.tiles
    list_bytes = 4 * 2 * (rows * (layout.kv_indices.shape[-1] + 1))
    if layout.columns is not None:
        list_bytes += 4 * columns * (sum(layout.columns.room) + 2)
    kept = _list_heads(layout)
    read = {1: reads.shared, kv_heads: reads.per_kv_head, heads: reads.per_query_head}[kept]
    q_tile, kv_tile = layout.block_size
    if together is not None:
        tiles, full_tiles, q_tile = (
            tiles // together.heads,
            full_tiles // together.heads,
            together.rows,
        )
        read = tiles
    touched = Touched(
        counted="tiles",
        pairs=tiles * q_tile * kv_tile,
        keys=read * kv_tile,
        keys_if=Sharing(*(n * kv_tile for n in vars(reads).values())),
        rows=spread(visited.flatten()),
        metadata=sum(t.numel() * t.element_size() for t in [*layout.lists, *layout.tables]),
        list_bytes=list_bytes + _membership_bytes(layout),
        tiles=tiles,
        full_tiles=full_tiles,
    )
    return budget_of(layout, touched)


def budget_of(layout: Layout, touched: Touched) -> Budget:
    """Logical work of a layout beside the physical work that was ``touched``. Reads the device."""
    address, grid, element = layout.address, layout.grid, layout.element
    dims = element.head_dim + element.v_head_dim
    pairs, key_bytes = int(layout.logical_pairs), dims * element.itemsize
    lists = (1, address.kv_heads, address.heads)
    return Budget(
        logical_pairs=pairs,
        dense_pairs=grid.batch * address.heads * grid.q_len * grid.kv_len,
        physical_tiles=touched.tiles,
        full_tiles=touched.full_tiles,
        partial_tiles=touched.tiles - touched.full_tiles,
        physical_pairs=touched.pairs,
        kv_bytes=touched.keys * key_bytes,
        metadata_bytes=touched.metadata,
        useful_flops=pairs * 2 * dims,
        executed_flops=touched.pairs * 2 * dims,
        rows=touched.rows,
        kv_bytes_if=Sharing(*(n * key_bytes for n in vars(touched.keys_if).values())),
        metadata_bytes_if=Sharing(*(n * grid.batch * touched.list_bytes for n in lists)),
        counted=touched.counted,
        assumed=None if element.given else element,
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
    return ceil_div(layout.select.rows, membership.WORD) * layout.select.candidates


def spread(work: Tensor) -> Rows:
    ordered = work.sort().values
    last = len(ordered) - 1
    at = [0, last // 2, round(0.99 * last), last]
    return Rows(*(int(ordered[i]) for i in at))
