"""XAttention: a block is worth the sum of its antidiagonals.

Source: Xu et al., "XAttention: Block Sparse Attention with Antidiagonal Scoring", 2025, 2.1, 2.2 and
Algorithm 1, https://arxiv.org/abs/2503.16428; which block crosses the threshold, and the blocks
that are always kept, are those of the published code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing, own_blocks, pooled
from flexsparse.selectors.covering import (
    check_share,
    in_reach,
    listed,
    per_head,
    precise,
    shared,
    smallest_cover,
)
from flexsparse.selectors.last_queries import products

# Strided pairs scored at once: enough to fill a device, little beside the tensors of a call.
_AT_ONCE = 2**26


@dataclass(frozen=True, eq=False, kw_only=True)
class XAttention(Selector):
    """The fewest blocks of a row that hold ``tau`` of its strided attention.

    Queries and keys are cut into cells of ``stride`` by ``stride``; the score of a cell is the sum of
    ``q . k`` over its antidiagonal, over ``stride``, and a softmax over the cells of a row that the
    rule reaches. A block of keys weighs what its cells hold. The first ``first`` blocks and the
    ``last`` ones up to the row's own are taken before all others; then the heaviest, and the block
    that crosses ``tau`` is kept. ``tau``: a number, or a threshold a query head, float ``[Hq]``
    (found in 2.3). The published code keeps no fixed blocks where attention is not causal:
    ``first=0, last=0``.

    Lists are per query head, as in the paper; heads that share one (``heads``) get all that any of
    them chose. Scores Q times S over ``stride`` squared, in chunks. Beyond the paper: lengths that
    are no multiple of ``stride`` are filled up with zeros.
    """

    block: int = 128
    q_block: int = 128
    keep: int = field(init=False, repr=False, default=1)
    stride: int = 8
    tau: float | Tensor = 0.9
    first: int = 1
    last: int = 1
    heads: Heads = "query"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("XAttention", self.heads)
        check_number("XAttention", "stride", self.stride, int, 1)
        check_number("XAttention", "first", self.first, int, 0)
        check_number("XAttention", "last", self.last, int, 0)
        check_share("XAttention", "tau", self.tau)
        for name in ("block", "q_block"):
            if getattr(self, name) % self.stride:
                raise ArgumentError(
                    f"XAttention {name} must be a multiple of stride, got {getattr(self, name)} "
                    f"and {self.stride}"
                )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        weights = self.weigh(q, k, grid, rule)
        reachable = in_reach(q, k, grid, rule, (self.q_block, self.block))
        always = own_blocks(
            grid, self.q_block, self.block, q.device, first=self.first, last=self.last
        )
        always = (always & reachable).expand_as(weights)
        tau = per_head(self.tau, q, "XAttention", "tau")
        chosen = smallest_cover(weights, tau, always) & reachable
        return shared(listed(chosen, grid, self.q_block, self.block), k.shape[1], self.heads)

    def weigh(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Tensor:
        """``[B, Hq, R, C]``: the strided attention of each block, as many a row as it has cells."""
        stride, dim = self.stride, q.shape[-1]
        seen = in_reach(q, k, grid, rule, (stride, stride))
        # Against the keys in order go the queries in reverse: their product is the antidiagonal.
        q, k = (_cells(precise(x), stride) for x in (q, k))
        q, k = q.flip(3).flatten(3), k.flatten(3)
        scale = (dim**-0.5 if self.scale is None else self.scale) / stride
        cells = self.q_block // stride
        step = cells * max(1, _AT_ONCE // (cells * k.shape[2] * q.shape[0] * q.shape[1]))
        parts = []
        for start in range(0, q.shape[2], step):
            rows = slice(start, start + step)
            scores = products(q[:, :, rows], k) * scale
            weights = scores.masked_fill(~seen[:, :, rows], -torch.inf).softmax(-1).nan_to_num(0.0)
            weights = pooled(weights.mT, self.block // stride, 0.0).sum(3).mT
            parts.append(pooled(weights, cells, 0.0).sum(3))
        return torch.cat(parts, 2)


def _cells(x: Tensor, stride: int) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, S / stride, stride, D]``, filled up with zeros."""
    cells: Tensor = pad(x, (0, 0, 0, -x.shape[2] % stride)).unflatten(2, (-1, stride))
    return cells
