"""Quest: read the key blocks that could hold the highest score.

Source: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024, 3.3,
https://arxiv.org/abs/2406.10774. The paper scores single queries of multi-head attention at decode;
here a row of queries, and the heads that share a list, take their highest bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.selectors.base import Heads, Selector, check_sharing, per_list, pooled


@dataclass(frozen=True, eq=False, kw_only=True)
class Quest(Selector):
    """Bounds ``q . k`` over a block by its channel-wise lowest and highest key.

    ``block`` is the paper's page (16 there), ``keep`` its budget in pages. ``heads`` says who shares
    a list: all, the query heads of a KV head, or nobody.
    """

    heads: Heads = "kv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("Quest", self.heads)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        q, k = q.float(), k.float()
        low = pooled(k, self.block, torch.inf).amin(3)
        high = pooled(k, self.block, -torch.inf).amax(3)
        low, high = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (low, high))
        # Each channel contributes the larger of q * low and q * high.
        bound = q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT
        bound = pooled(bound, self.q_block, -torch.inf).amax(3)
        return per_list(bound, k.shape[1], self.heads, "max")
