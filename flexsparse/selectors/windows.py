"""Overlapping windows of keys: the mass that queries give them, and what it says of blocks.

Window i holds the keys ``i * stride … i * stride + length - 1``; a query at position p sees it once it
is complete, ``i * stride + length - 1 <= p``. Whole windows alone: ``(S - length) // stride + 1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.selectors.base import Heads, per_list, pooled
from flexsparse.selectors.visible import by_rows, exactly


def windows(x: Tensor, length: int, stride: int) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, N, length, D]``, without a copy.

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
        *,
        q_block: int,
        heads: Heads,
        scale: float | None,
        then: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """``[B, H, R, C]``: ``then`` of the softmax mass ``[B, H, r, N]`` of windows, a few rows at once.

        ``compressed [B, Hkv, N, D]`` is one key a window. The mass is summed over a row's queries
        and over the heads that share a list; a query that sees no whole window gives none.
        """
        count, kv_heads = compressed.shape[2], compressed.shape[1]
        keys = exactly(compressed).repeat_interleave(q.shape[1] // kv_heads, 1)
        end = torch.arange(count, device=q.device) * self.stride + self.length - 1
        position = grid.positions(q.device)[:, None, :, None]
        scale = q.shape[-1] ** -0.5 if scale is None else scale

        def part(queries: Tensor, here: slice) -> Tensor:
            scores = exactly(queries) @ keys.mT * scale
            scores = scores.masked_fill(end > position[:, :, here], -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            weights = pooled(weights, q_block, 0.0).sum(3)
            return then(per_list(weights, kv_heads, heads, "sum"))

        return by_rows(q, q_block, count, part)

    def around(self, mass: Tensor, blocks: int, start: int) -> Tensor:
        """``[…, N]`` -> ``[…, blocks, block / stride + length / stride - 1]``: 0 beside the windows.

        For block j the windows from ``j * block / stride + start`` on. As many windows overlap a
        block, and they begin at ``start = 1 - length / stride``.
        """
        step = self.block // self.stride
        width = step + self.length // self.stride - 1
        missing = (blocks - 1) * step + width + start - mass.shape[-1]
        return torch.nn.functional.pad(mass, (-start, missing)).unfold(-1, width, step)
