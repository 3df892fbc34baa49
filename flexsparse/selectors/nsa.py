"""NSA: read the blocks that attention over compressed keys finds worth it.

Source: Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
2025, 3.3.2, equations 8 to 12, https://arxiv.org/abs/2502.11089. The whole attention with its three
branches is `flexsparse.modules.NSAAttention`; here keys are compressed by their mean.

>>> q = torch.zeros(1, 1, 128, 16)
>>> NSA(length=4, stride=2, block=8, keep=4).select(q, q, Grid(128, 128)).indices[0, 0, -1].tolist()
[0, 1, 14, 15]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_sharing
from flexsparse.selectors.visible import begun, nearest
from flexsparse.selectors.windows import Windows, windows

Alignment = Literal["overlap", "paper"]


@dataclass(frozen=True, eq=False, kw_only=True)
class NSA(Selector):
    """Ranks blocks by the mass that compressed keys hold, summed over the heads that share a list.

    ``length`` and ``stride``: of the windows that are compressed, l and d in the paper; both ``length``
    and ``block`` (l') are multiples of ``stride``. ``keep`` (n) counts the forced blocks: the ``first`` of
    the sequence, and of each query the ``local`` last, its own among them. Blocks of the future are
    hidden whatever the rule. A row of several queries adds up what each of them finds. A compressed
    key has the precision of the keys; what is made of it is at least fp32.

    ``alignment``: which windows speak for a block. ``"overlap"``: those that share keys with it, by how
    many strides they share, as public kernels do; ``"paper"``: equation 9 to the letter, whose window
    index runs backward from the block's first stride. They agree where length, stride and block are one.
    ``scale``: of the compressed attention, by default ``D ** -0.5``.
    """

    scores_are_mass: ClassVar[bool] = True

    length: int = 32
    stride: int = 16
    first: int = 1
    local: int = 2
    q_block: int = 1
    alignment: Alignment = "overlap"
    heads: Heads = "kv"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("NSA", self.heads)
        check_number("NSA", "first", self.first, int, 0)
        check_number("NSA", "local", self.local, int, 1)
        self._windows.check("NSA")
        if self.alignment not in ("overlap", "paper"):
            raise ArgumentError(
                f"NSA alignment must be 'overlap' or 'paper', got {self.alignment!r}"
            )

    @property
    def _windows(self) -> Windows:
        return Windows(self.length, self.stride, self.block)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.importance(q, windows(k, self.length, self.stride).mean(3), grid)

    def forced(self, grid: Grid, device: torch.device) -> Tensor:
        return nearest(grid, self.q_block, self.block, device, first=self.first, local=self.local)

    def importance(
        self, q: Tensor, compressed: Tensor, grid: Grid, lse: Tensor | None = None
    ) -> Tensor:
        """``[B, H, R, C]`` from one key a window, ``compressed [B, Hkv, N, D]``; the future is -inf.

        ``lse [B, Hq, Q]``, natural log, of attention to the compressed keys, where that is done anyway:
        half of the work is then spared.
        """
        worth = self._worth(q, compressed, grid, lse)
        return worth.masked_fill_(~begun(grid, self.q_block, self.block, q.device), -torch.inf)

    def _worth(self, q: Tensor, compressed: Tensor, grid: Grid, lse: Tensor | None) -> Tensor:
        """The same with 0 for the future."""
        blocks, per_window = self.block // self.stride, self.length // self.stride
        start = 1 - per_window if self.alignment == "overlap" else 2 - blocks - per_window
        return self._windows.mass(
            q, compressed, grid, "sum", start=start, q_block=self.q_block, heads=self.heads,
            scale=self.scale, lse=lse,
        )  # fmt: skip

    @torch.no_grad()
    def choose(
        self, q: Tensor, compressed: Tensor, grid: Grid, lse: Tensor | None = None
    ) -> Selection:
        """The causal candidates by compressed keys of one's own making, ``[B, Hkv, N, D]``; ``lse`` as in
        `importance`."""
        count = max(0, (grid.kv_len - self.length) // self.stride + 1)
        if compressed.shape[2] != count:
            raise ArgumentError(
                f"NSA.choose needs a key for each of the {count} whole windows of {self.length} "
                f"keys every {self.stride}, got {list(compressed.shape)}"
            )
        worth = self._worth(q, compressed, grid, lse)
        return self.best(worth, begun(grid, self.q_block, self.block, q.device), grid)
