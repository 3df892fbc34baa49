"""InfLLM-V2: read the blocks whose best window of keys a group of heads attends to most.

Source: Zhao et al., "InfLLM-V2: Dense-Sparse Switchable Attention for Seamless Short-to-Long Adaptation", 2025, 3,
https://arxiv.org/abs/2509.24663. The published kernels take the softmax's denominator from coarser
windows to save time; here it is exact.

>>> q = torch.zeros(1, 1, 256, 16)
>>> selector = InfLLMv2(length=4, stride=2, block=8, keep=4, local=2)
>>> selector.select(q, q, Grid(256, 256)).indices[0, 0, -1].tolist()
[0, 29, 30, 31]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_sharing
from flexsparse.selectors.physical import Keep
from flexsparse.selectors.visible import begun, nearest
from flexsparse.selectors.windows import Windows, windows


@dataclass(frozen=True, eq=False, kw_only=True)
class InfLLMv2(Selector):
    """Ranks blocks by the largest mass of a window that overlaps them, summed over a group's heads.

    ``length`` and ``stride``: of the windows whose keys are averaged. ``keep`` counts the forced blocks:
    the ``first`` of the sequence, and ``local`` up to each query's own (a window of 2048 keys is 32).
    ``own_block``: whether the own one is ``"beside"`` them, as the public code has it, or ``"among"`` them,
    as the paper counts. Blocks of the future are hidden whatever the rule. A row of several queries
    adds up their mass. Below ``dense_len`` keys (8192 as published; 0 is never) all blocks are kept.
    ``scale``: of the scores, by default ``D ** -0.5``.
    """

    scores_are_mass: ClassVar[bool] = True

    length: int = 32
    stride: int = 16
    keep: Keep = 64
    first: int = 1
    local: int = 32
    own_block: Literal["beside", "among"] = "beside"
    dense_len: int = 0
    q_block: int = 1
    heads: Heads = "kv"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("InfLLMv2", self.heads)
        for name, least in (("first", 0), ("local", 1), ("dense_len", 0)):
            check_number("InfLLMv2", name, getattr(self, name), int, least)
        self._windows.check("InfLLMv2")
        if self.own_block not in ("beside", "among"):
            raise ArgumentError(
                f"InfLLMv2 own_block must be 'beside' or 'among', got {self.own_block!r}"
            )

    @property
    def _windows(self) -> Windows:
        return Windows(self.length, self.stride, self.block)

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        if grid.kv_len < self.dense_len:
            every = grid.shape(self.q_block, self.block)[1]
            return replace(self, keep=every, dense_len=0).select(q, k, grid, rule)
        return super().select(q, k, grid, rule)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.importance(q, windows(k, self.length, self.stride).mean(3), grid)

    def importance(self, q: Tensor, compressed: Tensor, grid: Grid) -> Tensor:
        """``[B, H, R, C]`` from one key a window, ``compressed [B, Hkv, N, D]``; the future is -inf."""
        worth = self._windows.mass(
            q, compressed, grid, "max", start=1 - self.length // self.stride, q_block=self.q_block,
            heads=self.heads, scale=self.scale,
        )  # fmt: skip
        return worth.masked_fill_(~begun(grid, self.q_block, self.block, q.device), -torch.inf)

    def forced(self, grid: Grid, device: torch.device) -> Tensor:
        local = self.local + (self.own_block == "beside")
        return nearest(grid, self.q_block, self.block, device, first=self.first, local=local)
