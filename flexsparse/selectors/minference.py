"""MInference: for each head the pattern that keeps most of its attention.

Source: Jiang et al., "MInference 1.0", 2024, 3 and Algorithm 1 (the search),
https://arxiv.org/abs/2407.02490.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexsparse.errors import ArgumentError, ShapeError, check_table
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.a_shape_blocks import AShapeBlocks
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing
from flexsparse.selectors.block_sparse import BlockSparse
from flexsparse.selectors.covering import check_share, shared
from flexsparse.selectors.last_queries import last_queries
from flexsparse.selectors.vertical_slash_blocks import VerticalSlashBlocks


@dataclass(frozen=True, eq=False, kw_only=True)
class MInference(Selector):
    """Query head h takes the candidates of ``patterns[pattern_of[h]]``.

    ``patterns``: selectors of the same blocks, by default the three published ones;
    ``pattern_of``: int ``[Hq]``, which of them a head is under. Without it the heads take them in
    turn. `searched` finds it on a sample. Heads that share a list (``heads``) get all that any of
    them chose.
    """

    patterns: tuple[Selector, ...] = (VerticalSlashBlocks(), AShapeBlocks(), BlockSparse())
    pattern_of: Tensor | None = None
    heads: Heads = "query"
    block: int = field(init=False, repr=False, default=64)
    q_block: int = field(init=False, repr=False, default=64)
    keep: int = field(init=False, repr=False, default=1)

    def __post_init__(self) -> None:
        check_sharing("MInference", self.heads)
        given = self.patterns
        if not isinstance(given, tuple) or not given:
            raise ArgumentError(f"MInference patterns must be a tuple of selectors, got {given!r}")
        for pattern in given:
            if not isinstance(pattern, Selector):
                raise ArgumentError(f"MInference patterns must be selectors, got {pattern!r}")
        sizes = sorted({(pattern.q_block, pattern.block) for pattern in given})
        if len(sizes) > 1:
            raise ArgumentError(
                f"MInference patterns must have the same (q_block, block), got {sizes}"
            )
        for name, size in zip(("q_block", "block"), sizes[0], strict=True):
            object.__setattr__(self, name, size)
        super().__post_init__()
        if self.pattern_of is not None:
            check_table("MInference", "pattern_of", self.pattern_of, "int", "[Hq]")
            outside = self.pattern_of[(self.pattern_of < 0) | (self.pattern_of >= len(given))]
            if len(outside):
                raise ArgumentError(
                    f"MInference pattern_of must lie in 0..{len(given) - 1}, got {int(outside[0])}"
                )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        own = self.pattern_of
        if own is None:
            own = torch.arange(q.shape[1]) % len(self.patterns)
        if len(own) != q.shape[1]:
            raise ShapeError(
                f"MInference pattern_of must have one entry for each of the {q.shape[1]} query "
                f"heads, got {len(own)}"
            )
        own = own.cpu()
        lists = {
            i: _per_query_head(self.patterns[i].select(q, k, grid, rule), q, grid)
            for i in set(own.tolist())
        }
        width = max(x.shape[-1] for x in lists.values())
        mixed = torch.tensor(-1, dtype=torch.int32, device=q.device)
        for i, indices in lists.items():
            wide = pad(indices, (0, width - indices.shape[-1]), value=-1)
            mixed = torch.where((own == i).to(q.device)[:, None, None], wide, mixed)
        chosen = Selection.from_indices(
            mixed,
            kv_len=grid.kv_len,
            q_len=grid.q_len,
            kv_block=self.block,
            q_block=self.q_block,
            out_of_range="drop",
        )
        return shared(chosen, k.shape[1], self.heads)

    @classmethod
    @torch.no_grad()
    def searched(
        cls,
        patterns: tuple[Selector, ...],
        q: Tensor,
        k: Tensor,
        grid: Grid,
        rule: MaskMod | None = None,
        *,
        budget: float = 1.0,
        heads: Heads = "query",
        scale: float | None = None,
    ) -> Self:
        """The mixture that recalls most of a sample's attention, of patterns that cost no more than asked.

        ``q [B, Hq, Q, D]`` and ``k [B, Hkv, S, D]`` are the sample, ``patterns`` the candidates, the
        same pattern in several sizes among them. The recall of a pattern in a head is the softmax
        weight that falls on its candidates, a mean over queries; its cost is the pairs that it
        selects, as a share of those that a causal call under the rule sees. In each head the
        highest recall wins among patterns that cost at most ``budget``, the earlier one of equals;
        where all cost more, the cheapest. Takes the whole attention matrix, Q times S a head: for a
        sample, not for a model's every call.
        """
        check_share("MInference.searched", "budget", budget)
        mixture = cls(patterns=patterns, heads=heads)
        recall, cost = _recall_and_cost(mixture.patterns, q, k, grid, rule, scale)
        fits = cost <= budget
        best = recall.masked_fill(~fits, -torch.inf).argmax(0)
        return cls(
            patterns=patterns,
            pattern_of=torch.where(fits.any(0), best, cost.argmin(0)),
            heads=heads,
        )


def _recall_and_cost(
    patterns: tuple[Selector, ...],
    q: Tensor,
    k: Tensor,
    grid: Grid,
    rule: MaskMod | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """``[patterns, Hq]`` each."""
    whole = last_queries(q, k, grid, rule, grid.q_len, scale)
    # A query that sees nothing has nothing to recall.
    queries = whole.seen.any(-1).sum((0, 2)).clamp(min=1)
    pairs = whole.seen.sum((0, 2, 3)).clamp(min=1)
    recall, cost = [], []
    for pattern in patterns:
        chosen = pattern.select(q, k, grid, rule).dense()
        chosen = chosen.repeat_interleave(q.shape[1] // chosen.shape[1], 1) & whole.seen
        recall.append((whole.weights * chosen).sum((0, 2, 3)) / queries)
        cost.append(chosen.sum((0, 2, 3)) / pairs)
    return torch.stack(recall), torch.stack(cost)


def _per_query_head(selection: Selection, q: Tensor, grid: Grid) -> Tensor:
    """``[B, Hq, R, K]``."""
    each = selection.indices.repeat_interleave(q.shape[1] // selection.heads, 1)
    return each.expand(grid.batch, -1, -1, -1)
