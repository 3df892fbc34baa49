"""Causal: a query sees the keys up to its own position.

Source: Vaswani et al., "Attention Is All You Need", 2017, 3.2.3, https://arxiv.org/abs/1706.03762.

Known elsewhere as: ``is_causal`` of SDPA, aligned to the last query and key (lower right) as in
FlashAttention; autoregressive or decoder mask.

>>> from flexsparse.viz import picture
>>> print(picture(Causal(), 4))
#...
##..
###.
####
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class Causal(MaskRule):
    """Keys at or before the query's position.

    Where the queries stand is the call's ``q_offset``: by default the last query stands at the last
    key, as decoding needs.
    """

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx
