"""Quest: read the key blocks that could hold the highest score.

Source: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024, 3.3,
Algorithm 1, https://arxiv.org/abs/2406.10774. The paper scores single queries of multi-head attention
at decode; here a row of queries, and the heads that share a list, take their highest bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flexsparse.selectors.caches import Pool
from flexsparse.selectors.pooled import Pooled, highest


@dataclass(frozen=True, eq=False, kw_only=True)
class Quest(Pooled):
    """Bounds the attention score ``q . k / sqrt(D)`` over a block by its channel-wise extreme keys.

    ``block`` is the paper's page (16 there), ``keep`` its budget in pages. ``heads`` says who shares
    a list: all, the query heads of a KV head, or nobody.
    """

    pools: ClassVar[tuple[Pool, ...]] = ("amin", "amax")

    def rate(self, q: Tensor, *summaries: Tensor) -> Tensor:
        low, high = summaries
        scale = float(q.shape[-1] ** -0.5)
        return highest(q, low, high, q_block=self.q_block, heads=self.heads, scale=scale)
