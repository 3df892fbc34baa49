"""Sliding window: a query sees itself and the keys just before it.

Source: Beltagy et al., "Longformer", 2020, 3.1, https://arxiv.org/abs/2004.05150 (its causal half);
Jiang et al., "Mistral 7B", 2023, 2, https://arxiv.org/abs/2310.06825.

Known elsewhere as: local attention, ``sliding_window`` of Mistral, Gemma and gpt-oss,
``window_size=(size - 1, 0)`` of FlashAttention.

>>> from flexsparse.viz import picture
>>> print(picture(SlidingWindow(size=3), 6))
#.....
##....
###...
.###..
..###.
...###
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_number
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class SlidingWindow(MaskRule):
    """The last ``size`` keys, the query's own among them; causal by itself.

    ``size``: keys; 1 is the diagonal. FlashAttention's ``window_size=(w, 0)`` is ``size=w + 1`` here.
    """

    size: int

    def __post_init__(self) -> None:
        check_number("SlidingWindow", "size", self.size, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < self.size)
