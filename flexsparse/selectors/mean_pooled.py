"""Mean pooling: read the key blocks whose mean key scores highest.

Source: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025, 2.2, equations 5 and
6, https://arxiv.org/abs/2502.13189: its gate's affinity, without the forced own block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flexsparse.selectors.caches import Pool
from flexsparse.selectors.pooled import Pooled, highest


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanPooled(Pooled):
    """Ranks blocks by the attention score of their mean key.

    The last block's mean is over the keys that it has. A row of queries, and the heads that share a
    list, take their highest score.
    """

    pools: ClassVar[tuple[Pool, ...]] = ("mean",)

    def rate(self, q: Tensor, *summaries: Tensor) -> Tensor:
        scale = float(q.shape[-1] ** -0.5)
        return highest(q, summaries[0], None, q_block=self.q_block, heads=self.heads, scale=scale)
