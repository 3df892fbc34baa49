"""What is to be converted: raw candidates or a rule, with the shape of the call around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.rules import MaskRule
from flexsparse.selection import Selection
from flexsparse.shapes import ceil_div


@dataclass(frozen=True, eq=False)
class Problem:
    """``indices [B, H, R, K]`` as a selector leaves them, or None where a rule alone decides.

    ``tile`` is the side of the layout's tiles, by default the plan's choice; ``causal`` says which
    dense attention it is held against.
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


def past_blocks(
    length: int, lists: int, q_block: int, kv_block: int, keep: int, draw: torch.Generator
) -> Tensor:
    """int64 ``[1, lists, R, keep]``: the row's own last block and random earlier ones, then -1."""
    rows, columns = ceil_div(length, q_block), ceil_div(length, kv_block)
    keep = min(keep, columns)
    rank = torch.rand(1, lists, rows, columns, device=draw.device, generator=draw)
    row = torch.arange(rows, device=draw.device)
    own = (((row + 1) * q_block).clamp(max=length) - 1) // kv_block
    rank.masked_fill_(torch.arange(columns, device=draw.device) > own[:, None], -1)
    rank[..., row, own] = 2
    best, index = rank.topk(keep, dim=-1)
    return torch.where(best >= 0, index, -1)


def random_pages(batch: int, lists: int, pages: int, keep: int, draw: torch.Generator) -> Tensor:
    """int64 ``[batch, lists, 1, keep]``: different pages for each list."""
    rank = torch.rand(batch, lists, 1, pages, device=draw.device, generator=draw)
    return rank.topk(min(keep, pages), dim=-1).indices


def past_tokens(length: int, keep: int, draw: torch.Generator) -> Tensor:
    """int64 ``[1, 1, length, keep]``: evenly from the past of each query, repeats among them."""
    row = torch.arange(1, length + 1, device=draw.device)[:, None]
    shape = (1, 1, length, min(keep, length))
    return (torch.rand(shape, device=draw.device, generator=draw) * row).long()
