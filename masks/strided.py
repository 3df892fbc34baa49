"""Strided: the last keys, and every stride-th key before them.

Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019, 4.3,
https://arxiv.org/abs/1904.10509: two heads, `StridedLocal` and `StridedColumn`, or both in one.

Known elsewhere as: strided sparse attention. As two kinds of heads it is
``PerHead((StridedLocal(l), StridedColumn(l)))``.

>>> from flexsparse.viz import picture
>>> print(picture(StridedLocal(2), 6))
#.....
##....
###...
.###..
..###.
...###
>>> print(picture(StridedColumn(3), 6))
#.....
.#....
..#...
#..#..
.#..#.
..#..#
>>> print(picture(Strided(3), 8))
#.......
##......
###.....
####....
.####...
..####..
#..####.
.#..####
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_number
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class StridedLocal(MaskRule):
    """The first head: the ``stride`` keys before the query, and its own; causal by itself.

    ``stride``: positions, the paper's l.
    """

    stride: int

    def __post_init__(self) -> None:
        check_number("StridedLocal", "stride", self.stride, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= self.stride)


@dataclass(frozen=True, eq=False)
class StridedColumn(MaskRule):
    """The second head: keys a multiple of ``stride`` behind; causal by itself.

    ``stride``: positions, the paper's l.
    """

    stride: int

    def __post_init__(self) -> None:
        check_number("StridedColumn", "stride", self.stride, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & ((q_idx - kv_idx) % self.stride == 0)


@dataclass(frozen=True, eq=False)
class Strided(MaskRule):
    """Both heads' keys in one head; causal by itself. ``stride``: positions, the paper's l."""

    stride: int

    def __post_init__(self) -> None:
        check_number("Strided", "stride", self.stride, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        behind = q_idx - kv_idx
        return (behind >= 0) & ((behind <= self.stride) | (behind % self.stride == 0))
