"""Overlapping windows of keys: the mass that queries give them, and what it says of blocks.

Window i holds the keys ``i * stride … i * stride + length - 1``; a query at position p sees it once it
is complete, ``i * stride + length - 1 <= p``. Whole windows alone: ``(S - length) // stride + 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.kernels.block_mass import Around, block_mass
from flexsparse.selectors.base import Heads, sharing


def windows(x: Tensor, length: int, stride: int) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, N, length, D]``, without a copy.

    >>> import torch
    >>> windows(torch.arange(6.0).view(1, 1, 6, 1), 4, 2).flatten(3)[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    if x.shape[2] < length:
        return x.new_zeros((*x.shape[:2], 0, length, x.shape[3]))
    return x.unfold(2, length, stride).mT


@dataclass(frozen=True)
class Windows:
    """Windows of ``length`` keys every ``stride``, and the blocks of ``block`` keys they speak for."""

    length: int
    stride: int
    block: int

    def check(self, owner: str) -> None:
        """Refuses windows that are not whole strides, or blocks that are not."""
        for name in ("length", "stride"):
            check_number(owner, name, getattr(self, name), int, 1)
        for name in ("length", "block"):
            if (value := getattr(self, name)) % self.stride:
                raise ArgumentError(
                    f"{owner} {name} must be a multiple of stride {self.stride}, got {value}"
                )

    def mass(
        self,
        q: Tensor,
        compressed: Tensor,
        grid: Grid,
        how: Literal["sum", "max"],
        *,
        start: int,
        q_block: int,
        heads: Heads,
        scale: float | None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """``[B, H, R, C]``: the softmax mass of the windows around each block.

        ``compressed [B, Hkv, N, D]`` is one key a window. The windows of block j begin at ``j * block /
        stride + start``, and are as many as can overlap a block, which ``start = 1 - length / stride``
        does. ``"sum"`` counts each by the pairs of a stride of the block and one of the window that lie
        as far apart. The mass is summed over a row's queries and over the heads that share a list; a
        query that sees no whole window gives none. ``lse [B, Hq, Q]`` of this softmax, where it is
        known, is not found again.
        """
        step, per_window = self.block // self.stride, self.length // self.stride
        around = Around(
            self.length, self.stride, step, start, step + per_window - 1, min(step, per_window)
        )
        return block_mass(
            q, compressed, grid.positions(q.device), around, how, grid.shape(q_block, self.block)[1],
            q_block, sharing(q, compressed, heads), float(q.shape[-1] ** -0.5 if scale is None else scale),
            lse,
        )  # fmt: skip
