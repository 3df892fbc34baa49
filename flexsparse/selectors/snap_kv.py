"""SnapKV: the end of a prompt says which of its keys all later queries will read.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, 4.1 and
Listing 1, https://arxiv.org/abs/2404.14469. Heads that share a list add up their votes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from flexsparse.errors import SelectionError, check_number
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing, per_list
from flexsparse.selectors.caches import KeyCache
from flexsparse.selectors.oracle import attention_mass
from flexsparse.selectors.physical import Keep


@dataclass(frozen=True, eq=False, kw_only=True)
class SnapKV(Selector):
    """After ``prompt`` keys, queries read ``prefix`` of them, the prompt's last ``window``, and all since.

    The prefix keys are those that the prompt's last ``window`` queries attend to most, summed over
    these queries and pooled over ``kernel`` neighbours. Queries of the prompt itself read all. Lists
    are of single keys for single queries; ``scale`` is the attention's, by default ``D ** -0.5``.

    `select` needs the window's queries in ``q``. A cache needs them once, in its first `select`, and
    holds what was chosen from then on.
    """

    prompt: int
    prefix: int = 256
    window: int = 64
    kernel: int = 5
    pooling: Literal["mean", "max"] = "mean"
    heads: Heads = "kv"
    scale: float | None = None
    block: int = field(init=False, default=1)
    q_block: int = field(init=False, default=1)
    keep: Keep = field(init=False, default=1)

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("prefix", 0), ("window", 1), ("kernel", 1)):
            check_number("SnapKV", name, getattr(self, name), int, least)
        if self.kernel % 2 == 0:
            raise SelectionError(f"SnapKV kernel must be odd, got {self.kernel}")
        if self.pooling not in ("mean", "max"):
            raise SelectionError(f"SnapKV pooling must be 'mean' or 'max', got {self.pooling!r}")
        check_sharing("SnapKV", self.heads)
        object.__setattr__(self, "keep", self.prefix + self.window)
        super().__post_init__()

    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        return self.cache(k).select(q, grid, rule)

    def cache(self, k: Tensor, capacity: int | None = None) -> SnapCache:
        return SnapCache(self, k, capacity)

    def snap(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None) -> Tensor:
        """bool ``[B, H, prompt]``: which keys of the prompt are read after it."""
        window = min(self.window, self.prompt)
        start = self.prompt - window
        row = start - grid.positions(q.device)[:, :1] + torch.arange(window, device=q.device)
        if not (isinstance(grid.q_offset, Tensor) and q.is_cuda) and bool(
            ((row < 0) | (row >= grid.q_len)).any()
        ):
            raise SelectionError(
                f"SnapKV needs the queries at positions {start} to {self.prompt - 1} at first, got {grid}"
            )
        row = row.expand(q.shape[0], -1)[:, None, :, None].clamp(0, grid.q_len - 1)
        asking = q.gather(2, row.expand(-1, q.shape[1], -1, q.shape[3]))
        within = Grid(window, self.prompt, q_offset=start, batch=grid.batch)
        mass = attention_mass(asking, k[:, :, : self.prompt], within, rule, self.scale)
        votes = mass[..., :start].sum(2)
        if start:
            pool = avg_pool1d if self.pooling == "mean" else max_pool1d
            votes = pool(votes, self.kernel, 1, self.kernel // 2)
        votes = per_list(votes[:, :, None], k.shape[1], self.heads, "sum")[:, :, 0]
        best = votes.sort(dim=-1, descending=True, stable=True).indices[..., : self.prefix]
        kept = torch.zeros((*votes.shape[:2], self.prompt), dtype=torch.bool, device=q.device)
        kept[..., start:] = True
        return kept.scatter_(-1, best, True)


class SnapCache(KeyCache):
    """The keys until the first `select`, and the choice afterwards."""

    selector: SnapKV
    kept: Tensor | None = None

    def _write(self, k: Tensor, position: Tensor) -> None:
        if self.kept is None:
            super()._write(k, position)

    def _select(self, q: Tensor, grid: Grid, rule: MaskMod | None) -> Selection:
        of = self.selector
        if grid.kv_len < of.prompt:
            raise SelectionError(
                f"SnapKV selects among the {of.prompt} keys of its prompt or more, got {grid.kv_len}"
            )
        after = self.kept is not None
        if self.kept is None:
            self.kept = of.snap(q, self.keys, grid, rule)
            del self.keys
        key = torch.arange(grid.kv_len, device=q.device)
        position = grid.positions(q.device)[:, None, :, None]
        since = torch.nn.functional.pad(self.kept, (0, grid.kv_len - of.prompt), value=True)
        read = since[:, :, None].expand(-1, -1, grid.q_len, -1)
        if not after:
            read = read | (position < of.prompt)
        read = read & (key <= position)
        read = read & of.within_reach(q, self._nothing(q, grid), grid, rule, self.kept.shape[1])
        chosen = Selection.from_indices(
            torch.where(read, key, -1), kv_len=grid.kv_len, q_len=grid.q_len, out_of_range="drop"
        )
        if not after:
            return chosen
        most = of.prefix + of.window + grid.kv_len - of.prompt
        return Selection.from_indices(
            chosen.indices[..., :most], kv_len=grid.kv_len, q_len=grid.q_len, out_of_range="drop"
        )
