"""A-shape: the first keys and the last ones, at widths of each head's own.

Source: Jiang et al., "MInference 1.0", 2024, 3 (A-shape pattern), https://arxiv.org/abs/2407.02490;
found by Xiao et al., "StreamingLLM", 2023, https://arxiv.org/abs/2309.17453.

Known elsewhere as: StreamingLLM's mask, lambda-shaped mask (LM-Infinite), sink plus window.

>>> from flexsparse.viz import picture
>>> print(picture(AShape(sink=1, window=2), 6))
#.....
##....
###...
#.##..
#..##.
#...##
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_per_head
from flexsparse.rules import MaskRule, of_head


@dataclass(frozen=True, eq=False)
class AShape(MaskRule):
    """The first ``sink`` keys and the last ``window``, the query's own among them; causal by itself.

    ``sink`` and ``window``: keys, an int or int ``[Hq]``.
    """

    sink: int | Tensor
    window: int | Tensor

    def __post_init__(self) -> None:
        check_per_head("AShape", "sink", self.sink, int, 0)
        check_per_head("AShape", "window", self.window, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = q_idx - kv_idx < of_head(self.window, h)
        return (kv_idx <= q_idx) & ((kv_idx < of_head(self.sink, h)) | near)
