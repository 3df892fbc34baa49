"""SpargeAttn: trust a block's mean where its tokens are alike, and read all of it where they are not.

Source: Zhang et al., "SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model
Inference", 2025, 3, https://arxiv.org/abs/2502.18137: the prediction of blocks, its first stage,
without quantisation; ``share`` is the top-k of the authors' code.

>>> q, k = torch.ones(1, 1, 1, 4), torch.eye(4).repeat_interleave(2, 0).view(1, 1, 8, 4)
>>> k[..., 4:6, :] *= 9
>>> SpargeAttn(block=2, q_block=1, mass=0.97).select(q, k, Grid(1, 8)).indices.tolist()
[[[[0, 2, -1, -1]]]]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing, per_list
from flexsparse.selectors.moba import block_means
from flexsparse.selectors.visible import exactly


@dataclass(frozen=True, eq=False, kw_only=True)
class SpargeAttn(Selector):
    """Ranks blocks by the softmax of mean query and mean key, as many as ``mass`` or ``share`` asks.

    Either ``mass``: the best blocks whose mass together is at most this (the one that would cross it
    stays out, but one is always kept); or ``share``: this part of all key blocks, rounded down, at
    least one, also for rows that reach fewer. A block of keys whose tokens' mean cosine is not above
    ``similarity`` is not ranked but read by every row that reaches it, a row of such queries reads all it
    reaches, and so does every row the ``first`` blocks. ``keep`` caps a row, those blocks before all
    others; by default it does not.

    Only what the rule reaches is ranked. ``heads``: who shares a list, which is then the union of theirs; in
    the paper nobody. ``scale``: of the scores, by default ``D ** -0.5``.
    """

    block: int = 64
    q_block: int = 128
    keep: int = 2**30
    mass: float | None = 0.9
    share: float | None = None
    similarity: float = 0.1
    first: int = 0
    heads: Heads = "query"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("SpargeAttn", self.heads)
        check_number("SpargeAttn", "similarity", self.similarity, float, -1)
        check_number("SpargeAttn", "first", self.first, int, 0)
        if (self.mass is None) == (self.share is None):
            raise ArgumentError(
                f"SpargeAttn needs either mass or share, the other None, got mass={self.mass} and "
                f"share={self.share}"
            )
        for name, value in (("mass", self.mass), ("share", self.share)):
            if value is not None:
                check_number("SpargeAttn", name, value, float, 0)
                if value > 1:
                    raise ArgumentError(f"SpargeAttn {name} must be at most 1, got {value}")

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        kv_heads = k.shape[1]
        q, k = exactly(q), exactly(k).repeat_interleave(q.shape[1] // kv_heads, 1)
        reachable = self.within_reach(q, k, grid, rule, q.shape[1])
        unlike_q = self._unlike(q, self.q_block)[..., None]
        unlike_k = self._unlike(k, self.block)[:, :, None]
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = block_means(q, self.q_block) @ block_means(k, self.block).mT * scale
        scores = scores.masked_fill(unlike_k | ~reachable, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        column = torch.arange(weights.shape[-1], device=q.device)
        forced = (unlike_q | unlike_k | (column < self.first)) & reachable
        kept = forced | (self._ranked(weights) & reachable)
        weights = weights.masked_fill(forced, torch.inf)
        share = per_list(weights, kv_heads, self.heads, "sum")
        union = per_list(kept.to(weights.dtype), kv_heads, self.heads, "max") > 0
        return self.best(share, union, grid)

    def _ranked(self, weights: Tensor) -> Tensor:
        """bool ``[B, Hq, R, C]``: the best blocks of each row; equal ones by the lower index."""
        value, index = weights.sort(dim=-1, descending=True, stable=True)
        blocks = weights.shape[-1]
        if self.share is not None:
            count = torch.full((), int(self.share * blocks), device=weights.device)
        else:
            assert self.mass is not None
            count = (value.cumsum(-1) <= self.mass).sum(-1, keepdim=True)
        best = torch.arange(blocks, device=weights.device) < count.clamp(min=1)
        best = best.expand_as(weights)
        return torch.zeros_like(best).scatter(-1, index, best)

    def _unlike(self, x: Tensor, block: int) -> Tensor:
        """bool ``[B, H, blocks]``: whether the mean cosine of a block's pairs is too small."""
        # The mean over all pairs of directions is the squared length of their mean.
        return block_means(normalize(x, dim=-1), block).square().sum(-1) <= self.similarity
