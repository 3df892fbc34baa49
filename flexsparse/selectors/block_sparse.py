"""Block-sparse: pooled queries against pooled keys.

Source: Jiang et al., "MInference 1.0", 2024, 3 (block-sparse pattern) and Algorithm 3,
https://arxiv.org/abs/2407.02490.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_sharing
from flexsparse.selectors.covering import block_means, precise, shared
from flexsparse.selectors.last_queries import products
from flexsparse.selectors.physical import Keep


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockSparse(Selector):
    """The ``keep`` blocks whose mean key has the highest product with the row's mean query.

    Means are over the positions that a block has (the published code fills the last block up with
    zeros). Lists are per query head; heads that share one (``heads``) get all that any of them chose.
    """

    keep: Keep = 100
    heads: Heads = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("BlockSparse", self.heads)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        q, k = precise(q), precise(k)
        return products(block_means(q, self.q_block), block_means(k, self.block))

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        return shared(super().select(q, k, grid, rule), k.shape[1], self.heads)
