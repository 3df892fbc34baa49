"""Compression: one vector for each window of keys, or of values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexsparse.selectors.windows import windows


class MeanCompression(nn.Module):
    """``[B, H, S, D]`` -> ``[B, H, N, D]``: the mean of each window; nothing to learn.

    >>> MeanCompression(4, 2)(torch.arange(6.0).view(1, 1, 6, 1)).flatten().tolist()
    [1.5, 3.5]
    """

    def __init__(self, length: int, stride: int) -> None:
        super().__init__()
        self.length, self.stride = length, stride

    def forward(self, x: Tensor) -> Tensor:
        return windows(x, self.length, self.stride).mean(3)


class MLPCompression(nn.Module):
    """``[B, H, S, D]`` -> ``[B, H, N, D]``: an MLP of each window, whose tokens know their place in it.

    The learned places ``[length, D]`` are added to a window's tokens, which then lie side by side
    before one hidden layer of ``hidden`` features, by default D. All heads share the weights. Source: Yuan
    et al., "Native Sparse Attention", 2025, 3.3.1, equation 7, https://arxiv.org/abs/2502.11089, which leaves
    the MLP's form open.
    """

    def __init__(self, length: int, stride: int, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.place = nn.Parameter(torch.randn(length, dim) * dim**-0.5)
        self.mlp = nn.Sequential(
            nn.Linear(length * dim, hidden or dim), nn.GELU(), nn.Linear(hidden or dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        placed: Tensor = windows(x, self.length, self.stride) + self.place
        out: Tensor = self.mlp(placed.flatten(3))
        return out
