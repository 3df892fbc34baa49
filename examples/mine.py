"""A rule of one's own, beside the experiment that names it: `flexsparse check examples/mine.py:EveryNth n=4`."""

from dataclasses import dataclass

from torch import Tensor

import flexsparse as fs


@dataclass(frozen=True, eq=False)
class EveryNth(fs.MaskRule):
    """Every n-th key, wherever the query stands."""

    n: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx % self.n == 0
