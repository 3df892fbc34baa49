"""The physical budget as a loss: the tiles that a soft selection is expected to touch.

A kernel visits a tile as soon as one query of it wants one key of it. A selector trained on recall
alone spreads its candidates over many tiles; with this loss beside it, training trades recall for tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from flexsparse.arguments import tile_size
from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.shapes import ceil_div


@dataclass(frozen=True, eq=False, kw_only=True)
class TileBudget:
    """Tiles that a row of tiles visits past ``capacity``, in parts of its tiles, times ``weight``.

    ``tile`` is (queries, keys) of the kernel, or one size for both: queries that stand in one row of
    tiles share what any of them touches, so neighbours that want the same keys cost no more than one
    of them. ``capacity`` tiles a row are free, as a list of fixed length makes them.

    ``spread`` 1 is the expectation itself, whose gradient dies out where a tile holds many open
    gates: none of them alone could close it. A larger one counts ``spread`` gates as one: a lower
    bound of the expectation, whose gradient reaches tiles of about so many gates.
    """

    tile: int | tuple[int, int] = 128
    weight: float = 1.0
    capacity: int = 0
    spread: float = 1.0

    def __post_init__(self) -> None:
        tile_size(self.tile)
        if not self.weight >= 0 or not self.capacity >= 0 or not self.spread >= 1:
            raise ArgumentError(
                "TileBudget weight and capacity must be at least 0 and spread at least 1, got "
                f"{self.weight!r}, {self.capacity!r} and {self.spread!r}"
            )

    def __call__(self, gates: Tensor, q_block: int, block: int) -> Tensor:
        """``gates [B, H, R, C]`` in [0, 1], rows of ``q_block`` queries, candidates of ``block`` keys."""
        queries, keys = tile_size(self.tile)
        if queries % q_block or keys % block:
            raise ShapeError(
                f"TileBudget tile {(queries, keys)} must be a multiple of the selector's blocks "
                f"{(q_block, block)}: choose such a tile"
            )
        touched = expected_tiles(gates, (queries // q_block, keys // block), self.spread)
        visited = (touched.sum(-1) - self.capacity).clamp(min=0)
        return self.weight * visited.mean() / touched.shape[-1]


def expected_tiles(gates: Tensor, tile: tuple[int, int], spread: float = 1.0) -> Tensor:
    """``gates [B, H, R, C]`` -> ``[B, H, R', C']``: the chance that each tile is touched.

    ``1 - prod(1 - gate) ** (1 / spread)`` over the ``tile`` (rows, candidates) of gates: with
    ``spread`` 1 the chance that any of them is open, if each is on its own; the sum of all is the
    expected number of tiles. Gates of 0 and 1 count the very tiles that a layout lists.

    >>> expected_tiles(torch.tensor([[[[0.5, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 1.0]]]]), (2, 2))
    tensor([[[[0.7500, 1.0000]]]])
    """
    rows, columns = (ceil_div(n, t) for n, t in zip(gates.shape[-2:], tile, strict=True))
    missing = columns * tile[1] - gates.shape[-1], rows * tile[0] - gates.shape[-2]
    gates = torch.nn.functional.pad(gates, (0, missing[0], 0, missing[1]))
    # Sums, not a product: a product of many gates has no gradient that a float can hold.
    closed = -torch.log1p(-gates.clamp(max=1 - _LEAST))
    inside = rearrange(
        closed, "b h (r m) (c n) -> b h r c (m n)", r=rows, c=columns, m=tile[0], n=tile[1]
    )
    return -torch.expm1(-inside.sum(-1) / spread)


# An open gate as nearly 1: log(0) has no gradient.
_LEAST = 1e-6
