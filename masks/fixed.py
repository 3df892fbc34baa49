"""Fixed: the query's own block, and the last cells of every block before it.

Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019, 4.3,
https://arxiv.org/abs/1904.10509: two heads, `FixedLocal` and `FixedColumn`, or both in one.

Known elsewhere as: fixed sparse attention, ``FixedSparsityConfig`` in DeepSpeed. As two kinds of
heads it is ``PerHead((FixedLocal(l), FixedColumn(l, c)))``.

>>> from flexsparse.viz import picture
>>> print(picture(FixedLocal(3), 6))
#.....
##....
###...
...#..
...##.
...###
>>> print(picture(FixedColumn(3, cells=1), 4, 6))
..#...
..#...
..#...
..#..#
>>> print(picture(Fixed(3, cells=1), 8))
#.......
##......
###.....
..##....
..###...
..####..
..#..##.
..#..###
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import RuleError, check_number
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class FixedLocal(MaskRule):
    """The first head: keys of the query's own block; causal by itself.

    ``block``: positions, the paper's l.
    """

    block: int

    def __post_init__(self) -> None:
        check_number("FixedLocal", "block", self.block, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx // self.block == kv_idx // self.block)


@dataclass(frozen=True, eq=False)
class FixedColumn(MaskRule):
    """The second head: the last ``cells`` keys of each block; causal by itself.

    ``block``: positions, the paper's l; ``cells``: positions, the paper's c. Queries before the
    first such cell see nothing.
    """

    block: int
    cells: int = 1

    def __post_init__(self) -> None:
        _check_cells("FixedColumn", self.block, self.cells)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx % self.block >= self.block - self.cells)


@dataclass(frozen=True, eq=False)
class Fixed(MaskRule):
    """Both heads' keys in one head; causal by itself.

    ``block``: positions, the paper's l; ``cells``: positions, the paper's c.
    """

    block: int
    cells: int = 1

    def __post_init__(self) -> None:
        _check_cells("Fixed", self.block, self.cells)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = q_idx // self.block == kv_idx // self.block
        return (kv_idx <= q_idx) & (own | (kv_idx % self.block >= self.block - self.cells))


def _check_cells(owner: str, block: object, cells: object) -> None:
    check_number(owner, "block", block, int, 1)
    check_number(owner, "cells", cells, int, 1)
    if isinstance(block, int) and isinstance(cells, int) and cells > block:
        raise RuleError(f"{owner} cells must be at most block, got {cells} and {block}")
