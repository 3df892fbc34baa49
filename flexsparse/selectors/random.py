"""Random: the baseline everybody forgets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.selectors.base import Heads, Selector, check_sharing


@dataclass(frozen=True, eq=False, kw_only=True)
class Random(Selector):
    """``keep`` blocks within reach, drawn without replacement; the same ones for the same seed."""

    heads: Heads = "kv"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("Random", self.heads)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        heads = {"shared": 1, "kv": k.shape[1], "query": q.shape[1]}[self.heads]
        shape = (q.shape[0], heads, *grid.shape(self.q_block, self.block))
        # Drawn on the CPU, so that every device sees the same blocks.
        draw = torch.rand(shape, generator=torch.Generator().manual_seed(self.seed))
        return draw.to(q.device)
