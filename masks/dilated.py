"""Dilated window: a sliding window with gaps, so that few keys reach far.

Source: Beltagy et al., "Longformer", 2020, 3.1 (dilated sliding window),
https://arxiv.org/abs/2004.05150.

Known elsewhere as: dilated sliding window. Longformer's symmetric window of w keys is
``Dilated(w // 2 + 1, dilation, ahead=w // 2)``; its heads of different reach are tensors ``[Hq]``.

>>> from flexsparse.viz import picture
>>> print(picture(Dilated(size=3, dilation=2), 8))
#.......
.#......
#.#.....
.#.#....
#.#.#...
.#.#.#..
..#.#.#.
...#.#.#
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_per_head
from flexsparse.rules import MaskRule, of_head


@dataclass(frozen=True, eq=False)
class Dilated(MaskRule):
    """Every ``dilation``-th key: ``size`` of them up to the query's own, and ``ahead`` after it.

    ``size``: keys, the query's own among them, an int or int ``[Hq]``; ``dilation``: positions from
    one key to the next, the same; ``ahead``: keys past the query, the same. Causal by itself while
    ``ahead`` is 0; ``dilation=1`` is a plain window.
    """

    size: int | Tensor
    dilation: int | Tensor
    ahead: int | Tensor = 0

    def __post_init__(self) -> None:
        check_per_head("Dilated", "size", self.size, int, 1)
        check_per_head("Dilated", "dilation", self.dilation, int, 1)
        check_per_head("Dilated", "ahead", self.ahead, int, 0)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        step = of_head(self.dilation, h)
        behind = q_idx - kv_idx
        near = (behind < of_head(self.size, h) * step) & (behind >= -of_head(self.ahead, h) * step)
        return near & (behind % step == 0)
