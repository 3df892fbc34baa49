"""BigBird: blocks near the query, global blocks, and a few random ones.

Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, 2 and appendix D (blocks),
https://arxiv.org/abs/2007.14062. The first and the last block are global, as in its ITC form.

Known elsewhere as: block sparse attention of BigBird; ``bigbird_pegasus`` and ``big_bird`` in
transformers, ``BigBirdSparsityConfig`` in DeepSpeed. A decoder's is ``Causal() & BigBird(...)``.

>>> import torch
>>> from flexsparse.viz import picture
>>> print(picture(BigBird.drawn(8, block=1, window=3, random=1, seed=0), 8))
########
####...#
####.#.#
#####..#
#..#####
#.#.####
#..#.###
########
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import RuleError, check_number, check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class BigBird(MaskRule):
    """Window, global blocks and a table of random blocks; bidirectional.

    ``random``: bool ``[R, R]`` or ``[Hq, R, R]``, which key block (last axis) a query block sees
    besides, R blocks covering all keys; ``block``: positions a block; ``window``: blocks around the
    query's own and with it, odd.
    """

    random: Tensor
    block: int = 64
    window: int = 3

    def __post_init__(self) -> None:
        check_table("BigBird", "random", self.random, "bool", "[R, R]", "[Hq, R, R]")
        if self.random.shape[-1] != self.random.shape[-2]:
            raise RuleError(
                "BigBird random must have as many query blocks as key blocks, got "
                f"{list(self.random.shape)}"
            )
        check_number("BigBird", "block", self.block, int, 1)
        _check_window(self.window)

    @staticmethod
    def drawn(
        kv_len: int,
        block: int = 64,
        window: int = 3,
        random: int = 3,
        heads: int | None = None,
        seed: int = 0,
    ) -> "BigBird":
        """The paper's draw: for each query block ``random`` blocks outside its window and the ends.

        ``heads`` draws for each query head apart; the same seed draws the same table everywhere.
        """
        for field, value, least in (
            ("kv_len", kv_len, 1),
            ("block", block, 1),
            ("random", random, 0),
        ):
            check_number("BigBird", field, value, int, least)
        _check_window(window)
        if heads is not None:
            check_number("BigBird", "heads", heads, int, 1)
        blocks = -(-kv_len // block)
        at = torch.arange(blocks)
        taken = (at[:, None] - at).abs() <= window // 2
        taken[:, 0] = taken[:, -1] = True
        shape = (blocks, blocks) if heads is None else (heads, blocks, blocks)
        lots = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        best = lots.masked_fill(taken, -1.0).topk(min(random, blocks), -1)
        table = torch.zeros(shape, dtype=torch.bool).scatter(-1, best.indices, best.values >= 0)
        return BigBird(table, block, window)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, column = q_idx // self.block, kv_idx // self.block
        last = self.random.shape[-1] - 1
        everywhere = (row == 0) | (row == last) | (column == 0) | (column == last)
        near = (row - column).abs() <= self.window // 2
        drawn = self.random[row, column] if self.random.ndim == 2 else self.random[h, row, column]
        return everywhere | near | drawn


def _check_window(window: object) -> None:
    check_number("BigBird", "window", window, int, 1)
    if isinstance(window, int) and window % 2 == 0:
        raise RuleError(f"BigBird window must be odd, got {window}")
