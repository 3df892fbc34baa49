"""FlexPrefill: each head decides, input by input, between a query-aware and a vertical-slash pattern.

Source: Lai et al., "FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient
Long-Sequence Inference", 2025, 3 and Algorithms 2 to 4, https://arxiv.org/abs/2502.20766; diagonals
of blocks, budgets, and the blocks that are always kept are those of the published code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing
from flexsparse.selectors.covering import (
    block_means,
    block_sums,
    check_share,
    highest,
    in_reach,
    largest_within,
    listed,
    precise,
    row_ends,
    shared,
    smallest_cover,
)
from flexsparse.selectors.last_queries import Sample, by_distance, last_queries, products
from flexsparse.shapes import ceil_div


class Estimate(NamedTuple):
    """What the last queries tell of each head."""

    vertical: Tensor
    """``[B, Hq, C]``: their attention to each block of keys, summing to 1."""
    slash: Tensor
    """``[B, Hq, C]``: the same for each block of distances, the nearest first."""
    counts: tuple[Tensor, Tensor]
    """``[B, Hq]`` each: how many of these cover ``gamma``, within the budgets."""
    query_aware: Tensor
    """bool ``[B, Hq]``: whether pooled queries and keys foretell ``vertical`` well enough."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FlexPrefill(Selector):
    """The blocks that hold ``gamma`` of the attention, in the pattern that a head shows.

    No block of the future; inside a row's own block causality is the rule's.

    The exact softmax of the last ``block`` queries is summed over blocks of keys (vertical) and of
    distances (slash). Beside it stands the softmax of their mean against the mean key of each block.
    Where the square root of the Jensen-Shannon divergence of the two is below ``tau``, the head is
    query-aware: pooled attention of all rows, and of it the fewest blocks, whatever their rows, that
    hold ``gamma``, joined with ``min_budget`` verticals and slashes. All other heads keep as many
    verticals, and as many slashes, as hold ``gamma``, but no less than ``min_budget`` and no more
    than ``max_budget`` (both in tokens). Block 0 and the own diagonal come first. A slash of distance
    t is all blocks t before the one of the row's last query.

    ``counted``: "tokens" counts the keys, and the distances, that hold ``gamma``, and takes their
    number over ``block``, plus one, as the published code does; "blocks" counts blocks.
    ``crossing``: the query-aware block that crosses ``gamma`` is "kept" (the paper) or "dropped" (the
    code). Beyond both: a last block of fewer positions pools those that it has.

    Lists are per query head; heads that share one (``heads``) get all that any of them chose. Takes
    ``block`` times S, and rows times blocks, for each head.
    """

    block: int = 128
    q_block: int = 128
    keep: int = field(init=False, repr=False, default=1)
    gamma: float = 0.9
    tau: float = 0.1
    min_budget: int = 512
    max_budget: int | None = None
    counted: Literal["tokens", "blocks"] = "tokens"
    crossing: Literal["kept", "dropped"] = "kept"
    heads: Heads = "query"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("FlexPrefill", self.heads)
        check_share("FlexPrefill", "gamma", self.gamma)
        check_number("FlexPrefill", "tau", self.tau, float, 0)
        check_number("FlexPrefill", "min_budget", self.min_budget, int, 1)
        if self.max_budget is not None:
            check_number("FlexPrefill", "max_budget", self.max_budget, int, self.min_budget)
        for name, words in (("counted", ("tokens", "blocks")), ("crossing", ("kept", "dropped"))):
            if getattr(self, name) not in words:
                raise ArgumentError(
                    f"FlexPrefill {name} must be {words[0]!r} or {words[1]!r}, got "
                    f"{getattr(self, name)!r}"
                )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        found = self.estimate(q, k, grid, rule)
        _, end = row_ends(grid, self.q_block, q.device)
        own = torch.div(end, self.block, rounding_mode="floor")[:, None, :, None]
        column = torch.arange(found.vertical.shape[-1], device=q.device)
        distance = own - column
        causal = distance >= 0
        reachable = in_reach(q, k, grid, rule, (self.q_block, self.block)) & causal
        columns, diagonals = (
            highest(_zero_first(mass), count[..., None])
            for mass, count in zip((found.vertical, found.slash), found.counts, strict=True)
        )
        at = distance.clamp(0, len(column) - 1).flatten(1)[:, None]
        at = at.expand(*diagonals.shape[:2], -1)
        slashed = diagonals.gather(-1, at).unflatten(-1, distance.shape[2:])
        chosen = columns[:, :, None] | (slashed & (distance < len(column)))
        pooled = self.pooled(q, k, reachable)
        cover = smallest_cover if self.crossing == "kept" else largest_within
        best = cover(pooled.flatten(2), self.gamma).unflatten(-1, pooled.shape[2:])
        chosen = (chosen | (best & found.query_aware[..., None, None])) & reachable
        return shared(listed(chosen, grid, self.q_block, self.block), k.shape[1], self.heads)

    @torch.no_grad()
    def estimate(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Estimate:
        """The pattern of each head and how much of it is kept, from the last ``block`` queries."""
        sample = last_queries(q, k, grid, rule, self.block, self.scale)
        total = sample.weights.sum((2, 3))[..., None].clamp(min=torch.finfo(torch.float32).tiny)
        keys, distances = sample.weights.sum(2) / total, by_distance(sample) / total
        vertical, slash = block_sums(keys, self.block), block_sums(distances, self.block)
        expected = self._expected(q, k, sample)
        query_aware = _divergence(expected, vertical).sqrt() < self.tau
        blocks = vertical.shape[-1]
        least = min(ceil_div(self.min_budget, self.block), blocks)
        most = blocks if self.max_budget is None else ceil_div(self.max_budget, self.block)
        counts = []
        for fine, coarse in ((keys, vertical), (distances, slash)):
            if self.counted == "tokens":
                count = smallest_cover(fine, self.gamma).sum(-1) // self.block + 1
            else:
                count = smallest_cover(coarse, self.gamma).sum(-1)
            count = count.masked_fill(query_aware, least).clamp(least, min(most, blocks))
            counts.append(count)
        return Estimate(vertical, slash, (counts[0], counts[1]), query_aware)

    def pooled(self, q: Tensor, k: Tensor, reachable: Tensor) -> Tensor:
        """``[B, Hq, R, C]``: the softmax of mean queries against mean keys."""
        queries, keys = block_means(precise(q), self.q_block), block_means(precise(k), self.block)
        scores = products(queries, keys) * self._scale(q)
        return scores.masked_fill(~reachable, -torch.inf).softmax(-1).nan_to_num(0.0)

    def _expected(self, q: Tensor, k: Tensor, sample: Sample) -> Tensor:
        """``[B, Hq, C]``: the softmax of the mean of the last queries against mean keys."""
        count = sample.weights.shape[2]
        query = precise(q[:, :, -count:]).mean(2, keepdim=True)
        scores = products(query, block_means(precise(k), self.block))[:, :, 0] * self._scale(q)
        seen = block_sums(sample.seen.any(2).long(), self.block) > 0
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)

    def _scale(self, q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5) if self.scale is None else self.scale


def _zero_first(mass: Tensor) -> Tensor:
    """Entry 0 ahead of all others."""
    return torch.cat([torch.full_like(mass[..., :1], torch.inf), mass[..., 1:]], -1)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon, in nats: 0 for equals, log 2 for distributions with nothing in common.

    >>> _divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor(0.6931)
    """
    middle = ((p + q) / 2).clamp(min=torch.finfo(p.dtype).tiny)
    halves = [(x * (x.clamp(min=torch.finfo(x.dtype).tiny) / middle).log()).sum(-1) for x in (p, q)]
    return ((halves[0] + halves[1]) / 2).clamp(min=0)
