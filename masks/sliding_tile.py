"""Sliding tile: a window on an image or a video that moves tile by tile.

Source: Zhang et al., "Fast Video Generation with Sliding Tile Attention", 2025, 3,
https://arxiv.org/abs/2502.04507.

Known elsewhere as: STA, ``sliding_tile_attention`` of FastVideo, whose ``window_size`` is also in tiles.
Queries of a tile see the same keys, so that a kernel's tile is full or absent where the two agree.

>>> from flexsparse.viz import picture
>>> print(picture(SlidingTile(canvas=(2, 8), tile=(2, 2), window=(1, 3)), 16))
############....
############....
############....
############....
############....
############....
############....
############....
....############
....############
....############
....############
....############
....############
....############
....############
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from flexsparse.canvas import coordinates, in_shifted_window
from flexsparse.errors import RuleError, check_lengths
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class SlidingTile(MaskRule):
    """The ``window`` of tiles around the query's tile, moved inside the canvas at its borders.

    ``canvas``: tokens along each of 1 to 3 axes; ``tile``: tokens along each axis, dividing the
    canvas; ``window``: tiles along each axis. Positions run tile after tile, row-major among tiles
    and inside one, as in the paper: `order` says how to sort a row-major canvas. Positions past the
    canvas, such as text, neither see nor are seen.
    """

    canvas: tuple[int, ...]
    tile: tuple[int, ...]
    window: tuple[int, ...]

    def __post_init__(self) -> None:
        check_lengths("SlidingTile", "canvas", self.canvas, 1, None)
        check_lengths("SlidingTile", "tile", self.tile, 1, len(self.canvas))
        check_lengths("SlidingTile", "window", self.window, 1, len(self.canvas))
        if any(n % t for n, t in zip(self.canvas, self.tile, strict=True)):
            raise RuleError(
                f"SlidingTile tile must divide the canvas, got {self.tile} in {self.canvas}"
            )
        if any(w * t > n for n, t, w in zip(self.canvas, self.tile, self.window, strict=True)):
            raise RuleError(
                "SlidingTile window must fit into the canvas, got "
                f"{self.window} tiles of {self.tile} in {self.canvas}"
            )

    def order(self) -> Tensor:
        """int ``[tokens]``: the row-major index of each position, so that ``q[:, :, order]`` sorts.

        >>> SlidingTile((2, 4), (2, 2), (1, 1)).order().tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
        """
        split = [m for n, t in zip(self.canvas, self.tile, strict=True) for m in (n // t, t)]
        axes = range(len(split))
        at = torch.arange(prod(self.canvas)).view(split)
        return at.permute(*axes[::2], *axes[1::2]).flatten()

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        tokens, across = 1, []
        for length, size in zip(self.canvas, self.tile, strict=True):
            tokens = tokens * size
            across.append(length // size)
        q = coordinates(q_idx // tokens, tuple(across))
        kv = coordinates(kv_idx // tokens, tuple(across))
        seen = (q[0] >= 0) & (q[0] < across[0])
        for at, key, length, size in zip(q, kv, across, self.window, strict=True):
            seen = seen & in_shifted_window(at, key, size, length)
        return seen
