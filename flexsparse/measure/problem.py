"""What is to be converted: raw candidates or a rule, with the shape of the call around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.kernels.top_k import top_k
from flexsparse.rules import MaskRule
from flexsparse.selection import Selection


@dataclass(frozen=True, eq=False)
class Problem:
    """``indices [B, H, R, K]`` as a selector leaves them, or None where a rule alone decides.

    ``tile`` is the side of the layout's tiles, by default the plan's choice; ``causal`` says which
    dense attention it is held against. ``scores`` are what the indices are the best of. A ``fresh``
    rule changes from call to call, and its tiles are found each time. Where the work is uneven,
    ``even`` is as much of it spread evenly, ``padded`` every row as long as the longest, ``lengths``
    those of the requests that lie end to end. ``whole``: the same tiles, of which every pair counts.
    """

    grid: Grid
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    rule: MaskRule | None
    indices: Tensor | None = None
    q_block: int = 1
    kv_block: int = 1
    tile: int | None = None
    training: bool = False
    causal: bool = True
    scores: Tensor | None = None
    fresh: bool = False
    even: Problem | None = None
    padded: Problem | None = None
    lengths: tuple[int, ...] | None = None
    whole: Problem | None = None

    def select(self) -> Selection | None:
        """The Selection of the raw indices; on the device alone."""
        if self.indices is None:
            return None
        return Selection.from_indices(
            self.indices,
            kv_len=self.grid.kv_len,
            q_len=self.grid.q_len,
            kv_block=self.kv_block,
            q_block=self.q_block,
            out_of_range="drop",
        )

    def select_anew(self) -> Selection:
        """The same from the scores: the best of each row first."""
        assert self.scores is not None and self.indices is not None
        return Selection.of_sets(
            top_k(self.scores, self.indices.shape[-1]),
            kv_len=self.grid.kv_len,
            q_len=self.grid.q_len,
            kv_block=self.kv_block,
            q_block=self.q_block,
        )

    def qkv(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Normal numbers; they require gradients where the problem is of training."""
        draw = torch.Generator(self.device).manual_seed(seed)
        grid, (heads, kv_heads) = self.grid, self.heads
        shapes = ((heads, grid.q_len), (kv_heads, grid.kv_len), (kv_heads, grid.kv_len))
        q, k, v = (
            torch.randn(
                grid.batch, h, n, self.head_dim, dtype=self.dtype, device=self.device,
                generator=draw, requires_grad=self.training,
            )
            for h, n in shapes
        )  # fmt: skip
        return q, k, v

    @property
    def dense_pairs(self) -> int:
        """Pairs of the dense attention that the problem is held against, over batch and heads."""
        grid = self.grid
        rows = grid.batch * self.heads[0]
        if self.causal:
            return rows * grid.q_len * (grid.q_len + 1) // 2
        return rows * grid.q_len * grid.kv_len
