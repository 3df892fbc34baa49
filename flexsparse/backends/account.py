"""What the backend that runs a layout touches: its tiles, or what it reads instead of visiting any."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexsparse.backends import decode, dense, flex, gather
from flexsparse.backends.candidates import Candidates
from flexsparse.budget import Budget, Sharing, Together, Touched, budget_of, count, spread
from flexsparse.layout import Layout

# Keys listed at a time where a fallback's are counted.
_AT_ONCE = 2**24


def budget(backend: str, layout: Layout, *, plain: bool, grads: bool) -> Budget:
    """The budget of a forward of ``layout`` by ``backend``. Reads the device.

    ``plain``: without a score rule, and no lse was asked for; ``grads``: gradients are wanted.
    """
    if backend == gather.name:
        return budget_of(layout, _gathered(layout))
    if backend == dense.name:
        return budget_of(layout, _all_pairs(layout, plain))
    return count(layout, _together(backend, layout, plain and not grads))


def _together(backend: str, layout: Layout, plain: bool) -> Together | None:
    heads, kv_heads = layout.address.kernel_heads
    rows, on_cuda = layout.span.q_len, layout.kv_indices.is_cuda
    if backend == decode.name:
        heads_a_lane = heads // kv_heads if decode.shares(layout) else 1
        return Together(heads_a_lane, decode.rows_held(heads_a_lane * rows, on_cuda))
    cut = layout.launches is not None and layout.launches.rows is not None
    # Pieces hold more queries than are decoded.
    if backend == flex.name and on_cuda and plain and not cut and flex.decoded(layout, rows):
        group = heads // kv_heads
        return Together(group, flex.decode_rows(rows, group))
    return None


def _gathered(layout: Layout) -> Touched:
    """Of lists of keys, read once for the query heads that share each."""
    of = gather.candidates(layout)
    select, grid, heads = layout.select, layout.grid, layout.address.heads
    assert select is not None
    query = torch.arange(grid.q_len, device=of.indices.device)
    near = _near(of, grid.q_len)

    def read(indices: Tensor, lists: int) -> Tensor:
        """int64 ``[B, lists, Q]``: keys of the candidates ``[B or 1, H, R, K]``, and of the fallback."""
        keys = _sizes(of, indices).sum(-1)[:, :, query // of.q_block]
        # One list a sequence serves all, and of several neighbours are alike.
        keys, beside = (
            x.repeat_interleave(lists // x.shape[1], 1) for x in (keys, _joined(near, lists))
        )
        return (keys + beside).expand(grid.batch, -1, -1)

    own = read(of.indices, of.lists)
    keys, sharing = int(own.sum()), heads // of.lists
    per_kv_head = int(read(_union(of.indices, of.kv_heads), of.kv_heads).sum())
    shared = int(read(_union(of.indices, 1), 1).sum()) * of.kv_heads
    tables = [of.indices, *of.tables]
    return Touched(
        counted="keys",
        pairs=keys * sharing,
        keys=keys,
        keys_if=Sharing(shared, per_kv_head, keys * sharing),
        rows=spread(own.flatten()),
        metadata=sum(t.numel() * t.element_size() for t in tables),
        list_bytes=of.indices[0, 0].numel() * of.indices.element_size(),
    )


def _sizes(of: Candidates, indices: Tensor) -> Tensor:
    """int64: how many keys each candidate is; the last may be cut short, an unused slot is none."""
    left = of.kv_len - indices.to(torch.int64) * of.kv_block
    return left.clamp(max=of.kv_block).masked_fill(indices < 0, 0)


def _union(indices: Tensor, lists: int) -> Tensor:
    """Candidates ``[B, H, R, K]`` of heads that share ``lists`` lists between them, -1 for none."""
    if indices.shape[1] <= lists:
        return indices
    met = indices.unflatten(1, (lists, -1)).transpose(2, 3).flatten(3).sort(-1).values
    again = torch.zeros_like(met, dtype=torch.bool)
    again[..., 1:] = met[..., 1:] == met[..., :-1]
    unique: Tensor = met.masked_fill(again, -1)
    return unique


def _near(of: Candidates, q_len: int) -> Tensor:
    """int64 ``[B or 1, H, Q]``: keys of the fallback, read where a query sees no candidate."""
    if not of.reach:
        return of.indices.new_zeros((1, 1, q_len), dtype=torch.int64)
    at_once = max(1, _AT_ONCE // (of.batch * of.lists * of.width))
    reach = min(of.reach, of.kv_len)
    parts = [
        (of.visible(first, min(first + at_once, q_len))[..., -reach:] >= 0).sum(-1)
        for first in range(0, q_len, at_once)
    ]
    return torch.cat(parts, -1)


def _joined(near: Tensor, lists: int) -> Tensor:
    """The same of ``lists`` lists: what the neediest of the heads in each reads."""
    return near if near.shape[1] <= lists else near.unflatten(1, (lists, -1)).amax(2)


def _all_pairs(layout: Layout, plain: bool) -> Touched:
    """Of dense attention as torch runs it: with a mask all pairs, and K and V repeated for each head."""
    grid, address = layout.grid, layout.address
    causal = dense.without_mask(layout, plain)
    device = layout.kv_indices.device
    seen = torch.full((grid.q_len,), grid.kv_len, device=device)
    if causal:
        seen = torch.arange(1, grid.q_len + 1, device=device)
    per_kv_head, per_query_head = (
        grid.batch * heads * grid.kv_len for heads in (address.kv_heads, address.heads)
    )
    keys, mask = per_kv_head, 0
    if causal is None:
        mask = math.prod(layout.kv_num_blocks.shape[:2]) * layout.span.q_len * grid.kv_len
        if plain and address.rows_per_query == 1:
            # torch's kernels with masks take a KV head for each query head.
            keys = per_query_head
    return Touched(
        counted="pairs",
        pairs=grid.batch * address.heads * int(seen.sum()),
        keys=keys,
        keys_if=Sharing(per_kv_head, per_kv_head, per_query_head),
        rows=spread(seen),
        metadata=mask,
        list_bytes=grid.q_len * grid.kv_len if mask else 0,
    )


_WITHOUT_TILES: dict[str, str] = {
    gather.name: "each query's candidates key by key",
    dense.name: "all pairs",
}


def reads(backend: str, tile: tuple[int, int]) -> str:
    """In words, what a backend reads.

    >>> reads("flex", (128, 64)), reads("gather", (128, 64))
    ('tiles of 128x64', "each query's candidates key by key")
    """
    return _WITHOUT_TILES.get(backend, f"tiles of {tile[0]}x{tile[1]}")
