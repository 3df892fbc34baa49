"""The decode state of a selector: what it holds about the keys so far, added to at each step.

Buffers have the size of their capacity and are written in place at ``length``, a position on the
device. `append` therefore stands in a CUDA graph, and so does `select` with a grid of the whole
capacity whose rule hides what is not there yet (``Causal()`` with ``q_offset`` a tensor).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.grid import Grid
from flexsparse.occupancy import on_device_only
from flexsparse.parameters import describe
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.shapes import axes, ceil_div

if TYPE_CHECKING:
    from flexsparse.selectors.base import Selector
    from flexsparse.selectors.pooled import Pooled

Pool = Literal["amin", "amax", "mean"]


class Cache:
    """Knows how many keys there are, and nothing of them: enough for who never looks at keys.

    `append` takes the next keys, ``[B, Hkv, n, D]``; `select` gives what the selector itself gives
    for all keys so far (``grid.kv_len`` of them). What lies past ``capacity`` is dropped, and an error
    on the CPU.
    """

    def __init__(self, selector: Selector, k: Tensor, capacity: int | None = None) -> None:
        axes(k=(k, "b h n d"))
        capacity = k.shape[2] if capacity is None else capacity
        if type(capacity) is not int or capacity < k.shape[2]:
            raise ArgumentError(
                f"capacity must be an int of at least the {k.shape[2]} keys there are, got {capacity!r}"
            )
        self.selector = selector
        self.capacity = capacity
        self.length = torch.zeros((), dtype=torch.int64, device=k.device)
        # As the host knows it; None once a compiled or captured step, which is replayed, adds to it.
        self._held: int | None = 0
        self._form = (k.shape[0], k.shape[1], k.shape[3])
        self._start(k)
        self.append(k)

    @torch.no_grad()
    def append(self, k: Tensor) -> None:
        """The keys that come next; work and memory traffic for these alone."""
        if not isinstance(k, Tensor):
            raise ArgumentError(f"append takes keys [B, Hkv, n, D], got {type(k).__name__}")
        if k.ndim != 4 or (k.shape[0], k.shape[1], k.shape[3]) != self._form:
            b, h, d = self._form
            raise ShapeError(f"append takes keys [{b}, {h}, n, {d}], got {list(k.shape)}")
        seen = k.device.type == "cpu" and not on_device_only(k.device)
        if seen and int(self.length) + k.shape[2] > self.capacity:
            raise ShapeError(
                f"append of {k.shape[2]} keys to {int(self.length)} exceeds the capacity {self.capacity}: "
                "make the cache with a larger one"
            )
        position = self.length + torch.arange(k.shape[2], device=k.device)
        # One slot past the end takes what does not fit.
        self._write(k, position.clamp(max=self.capacity))
        self.length += k.shape[2]
        if on_device_only(k.device):
            self._held = None
        elif self._held is not None:
            self._held = min(self._held + k.shape[2], self.capacity)

    @torch.no_grad()
    def select(self, q: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        """The candidates of the queries ``q`` among the keys so far.

        A grid of another length than that of the keys so far is an error, where the host can know; a
        longer one stands for a buffer, and its ``q_offset`` says where the queries stand.
        """
        if grid.kv_len > self.capacity:
            raise ShapeError(
                f"a cache of capacity {self.capacity} selects among that many keys at most, got a grid "
                f"of {grid.kv_len}"
            )
        axes(q=(q, "b h n d"))
        batch, kv_heads, _ = self._form
        if q.shape[0] != batch or q.shape[1] % kv_heads or q.shape[2] != grid.q_len:
            raise ShapeError(
                f"a cache of {kv_heads} KV heads of {batch} sequences selects for q [{batch}, Hq, "
                f"{grid.q_len}, D] on {grid}, got {list(q.shape)}"
            )
        self._refuse_other_keys(grid, q.device)
        return self._select(q, grid, rule)

    def __repr__(self) -> str:
        # What a graph has added, the device alone knows.
        held = "up to" if self._held is None else f"{self._held} of"
        b, h, d = self._form
        return (
            f"{type(self).__name__}({describe(self.selector)}, {held} {self.capacity} keys "
            f"[{b}, {h}, n, {d}] on {self.length.device})"
        )

    def _refuse_other_keys(self, grid: Grid, device: torch.device) -> None:
        """An append that was forgotten, or a grid that leaves keys out."""
        offset = grid.q_offset
        if isinstance(offset, Tensor) and grid.kv_len == self.capacity and on_device_only(device):
            return  # as positions, lengths are the device's alone
        held = self._held
        if held is None and not on_device_only(device):
            held = min(int(self.length), self.capacity)
        if held is None or grid.kv_len == held:
            return
        if grid.kv_len < held:
            raise ShapeError(
                f"a cache that holds {held} keys selects among all of them, got a grid of {grid.kv_len}: "
                f"give Grid(q_len, {held})"
            )
        if isinstance(offset, Tensor):
            if offset.device.type != "cpu" or on_device_only(device) or not offset.numel():
                return
            offset = int(offset.max())
        if offset + grid.q_len > held:
            raise ShapeError(
                f"the cache holds {held} keys, got a grid of {grid.kv_len} whose last query stands at "
                f"position {offset + grid.q_len - 1}: append the keys of this step before its select"
            )

    def _start(self, k: Tensor) -> None:
        """Makes the buffers, for keys such as ``k``."""

    def _write(self, k: Tensor, position: Tensor) -> None:
        """Writes keys at their positions, ``[n]``; the position ``capacity`` is nobody's."""

    def _select(self, q: Tensor, grid: Grid, rule: MaskMod | None) -> Selection:
        return self.selector.select(q, self._nothing(q, grid), grid, rule)

    def _nothing(self, q: Tensor, grid: Grid) -> Tensor:
        """Keys of the right form that hold no memory."""
        b, h, d = self._form
        return torch.zeros((), dtype=q.dtype, device=q.device).expand(b, h, grid.kv_len, d)


class KeyCache(Cache):
    """Holds the keys themselves, for who must look at all of them."""

    def _start(self, k: Tensor) -> None:
        b, h, d = self._form
        self.keys = k.new_zeros((b, h, self.capacity + 1, d))

    def _write(self, k: Tensor, position: Tensor) -> None:
        self.keys.index_copy_(2, position, k.to(self.keys.dtype))

    def _select(self, q: Tensor, grid: Grid, rule: MaskMod | None) -> Selection:
        return self.selector.select(q, self.keys[:, :, : grid.kv_len], grid, rule)


class PageCache(Cache):
    """Holds the lowest, highest or mean key of each block."""

    selector: Pooled

    def __init__(self, selector: Pooled, k: Tensor, capacity: int | None = None) -> None:
        super().__init__(selector, k, capacity)

    def _start(self, k: Tensor) -> None:
        b, h, d = self._form
        pages = ceil_div(self.capacity, self.selector.block)
        empty: dict[Pool, float] = {"amin": torch.inf, "amax": -torch.inf, "mean": 0.0}
        self.pools = {
            # Sums of up to thousands of keys, exact enough not to depend on their order.
            pool: torch.full(
                (b, h, pages + 1, d),
                empty[pool],
                dtype=torch.float64 if pool == "mean" else k.dtype,
                device=k.device,
            )
            for pool in self.selector.pools
        }
        self.filled = torch.zeros(pages + 1, dtype=torch.int64, device=k.device)

    def _write(self, k: Tensor, position: Tensor) -> None:
        last = self.filled.shape[0] - 1
        page = torch.where(position < self.capacity, position // self.selector.block, last)
        index = page[None, None, :, None].expand(k.shape)
        for pool, held in self.pools.items():
            how = "sum" if pool == "mean" else pool
            held.scatter_reduce_(2, index, k.to(held.dtype), how, include_self=True)
        self.filled.scatter_add_(0, page, torch.ones_like(page))

    def _select(self, q: Tensor, grid: Grid, rule: MaskMod | None) -> Selection:
        pages = ceil_div(grid.kv_len, self.selector.block)
        summaries = [
            self._mean(held, pages) if pool == "mean" else held[:, :, :pages]
            for pool, held in self.pools.items()
        ]
        score = self.selector.rate(q, *summaries)
        return self.selector.chosen(q, summaries[0], score, grid, rule)

    def _mean(self, held: Tensor, pages: int) -> Tensor:
        filled = self.filled[:pages].clamp(min=1)[:, None]
        return (held[:, :, :pages] / filled).float()
