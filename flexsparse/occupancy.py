"""Which tiles anything touches, and what the tiles that were evaluated amount to."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.coverage import Coverage, Span, every_tile
from flexsparse.errors import EmptyRowError
from flexsparse.grid import Grid
from flexsparse.program import MaskProgram
from flexsparse.selection import Selection


def kernel_span(address: Identity, grid: Grid, block_size: tuple[int, int]) -> Span:
    """Lengths and tiles as the kernel counts them, in rows."""
    return Span(grid.q_len * address.rows_per_query, grid.kv_len, *block_size)


def logical_span(address: Identity, grid: Grid, block_size: tuple[int, int]) -> Span:
    """The same rows and columns of tiles, counted in queries."""
    return Span(grid.q_len, grid.kv_len, block_size[0] // address.rows_per_query, block_size[1])


def occupancy(select: Selection, span: Span) -> Tensor:
    """bool ``[B, H, R, C]``: the tiles that some candidate of some of their rows touches.

    ``span`` counts queries, as the selection does.
    """
    rows, columns = span.tiles
    device = select.device
    row = torch.arange(select.rows, device=device)
    first_r = row * select.q_block // span.q_tile
    last_r = ((row + 1) * select.q_block - 1).clamp(max=span.q_len - 1) // span.q_tile
    chosen = select.indices.to(torch.int64)
    first_c = chosen * select.kv_block // span.kv_tile
    last_c = ((chosen + 1) * select.kv_block - 1).clamp(max=span.kv_len - 1) // span.kv_tile
    batch, heads = select.shape[:2]
    # One tile past the last: unused slots write there.
    occupied = torch.zeros((batch, heads, rows * columns + 1), dtype=torch.bool, device=device)
    # A block of b touches at most this many tiles of t, however it lies.
    row_steps = (min(select.q_block, span.q_len) - 2) // span.q_tile + 2
    column_steps = (min(select.kv_block, span.kv_len) - 2) // span.kv_tile + 2
    for i in range(row_steps):
        r = (first_r + i)[:, None]
        for j in range(column_steps):
            c = first_c + j
            inside = (chosen >= 0) & (r <= last_r[:, None]) & (c <= last_c)
            slot = torch.where(inside, r * columns + c, rows * columns)
            occupied.scatter_(-1, slot.flatten(2), True)
    return occupied[..., :-1].view(batch, heads, rows, columns)


def list_axes(program: MaskProgram, grid: Grid, occupied: Tensor | None) -> tuple[int, int]:
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


def on_device_only(device: torch.device) -> bool:
    """Whether the host must not look: inside torch.compile, or while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def tiles_of(occupied: Tensor) -> Tensor:
    """``[n, 4]``: the tiles to evaluate. Only those occupied, if the host may count them."""
    if on_device_only(occupied.device):
        b, h, rows, columns = occupied.shape
        return every_tile(b, h, Span(rows, columns, 1, 1), occupied.device)
    return occupied.nonzero()


def tile_maps_of(
    tiles: Tensor, covered: Coverage, lists: tuple[int, int], span: Span
) -> tuple[Tensor, Tensor]:
    maps = torch.zeros((2, *lists, *span.tiles), dtype=torch.bool, device=tiles.device)
    at = tiles.unbind(1)
    # A tile in which nothing exists or nothing is allowed is not listed at all.
    maps[0].index_put_(at, (covered.visible > 0) & ~covered.full)
    maps[1].index_put_(at, (covered.visible > 0) & covered.full)
    return maps[0], maps[1]


def seeing_rows(tiles: Tensor, queries: Tensor, lists: tuple[int, int], span: Span) -> Tensor:
    """bool ``[B, H, q_len]`` in kernel coordinates: which rows see anything."""
    rows = span.tiles[0]
    seen = torch.zeros(
        (lists[0] * lists[1] * rows, span.q_tile), dtype=torch.int32, device=tiles.device
    )
    if len(tiles):
        b, h, r, _ = tiles.unbind(1)
        seen.index_add_(0, (b * lists[1] + h) * rows + r, queries.to(torch.int32))
    return seen.view(*lists, -1)[..., : span.q_len] > 0


def seen_keys_of(
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


def near(empty: Tensor, address: Identity, grid: Grid, reach: int, span: Span) -> Tensor:
    """bool ``[B, H, R, C]``: tiles that hold the last ``reach`` keys of a query in ``empty``."""
    rows, columns = span.tiles
    position = grid.positions(empty.device)[:, None]
    if position.shape[0] > 1:
        position = address.lists(position, grid.batch)
    position = position.repeat_interleave(address.rows_per_query, -1)
    first = (position - reach + 1).clamp(min=0) // span.kv_tile
    last = position.clamp(max=span.kv_len - 1) // span.kv_tile
    row = torch.arange(span.q_len, device=empty.device) // span.q_tile
    near = torch.zeros(
        (*empty.shape[:2], rows * columns + 1), dtype=torch.bool, device=empty.device
    )
    for step in range((min(reach, span.kv_len) - 2) // span.kv_tile + 2):
        column = first + step
        slot = torch.where(
            empty & (position >= 0) & (column <= last), row * columns + column, rows * columns
        )
        near.scatter_(-1, slot, True)
    return near[..., :-1].view(*empty.shape[:2], rows, columns)


def refuse_empty(seen: Tensor, address: Identity, grid: Grid) -> None:
    if bool(seen.all()):
        return
    entry, lane, row = (~seen).nonzero()[0].unbind()
    b, h, query, _ = address.logical(entry, lane, row, row)
    raise EmptyRowError(
        f"query {int(query)} of batch {int(b)}, head {int(h)} sees no key, and empty='error': allow it "
        "one by rule, selection or fallback='self', or let it give zero with empty='zero'"
    )
