"""Block diagonal: the sequence cut into blocks that do not see each other.

Source: Qiu et al., "Blockwise Self-Attention for Long Document Understanding", 2019, 3 (the
identity permutation), https://arxiv.org/abs/1911.02972.

Known elsewhere as: local, blocked or chunked attention. Llama 4's chunked attention is
``Causal() & BlockDiagonal(8192)``; blocks of unequal length are a `Document`.

>>> from flexsparse.viz import picture
>>> print(picture(BlockDiagonal(3), 7))
###....
###....
###....
...###.
...###.
...###.
......#
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_per_head
from flexsparse.rules import MaskRule, of_head


@dataclass(frozen=True, eq=False)
class BlockDiagonal(MaskRule):
    """Keys of the query's own block. ``block``: positions, an int or int ``[Hq]``."""

    block: int | Tensor

    def __post_init__(self) -> None:
        check_per_head("BlockDiagonal", "block", self.block, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = of_head(self.block, h)
        return q_idx // block == kv_idx // block
