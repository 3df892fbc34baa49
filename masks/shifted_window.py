"""Shifted window: an image or a video cut into windows, every other layer half a window aside.

Source: Liu et al., "Swin Transformer", 2021, 3.2, https://arxiv.org/abs/2103.14030; for video in
Liu et al., "Video Swin Transformer", 2021, 3.2, https://arxiv.org/abs/2106.13230.

Known elsewhere as: W-MSA (no shift) and SW-MSA of Swin. Its cyclic shift and region mask bring windows
cut by the border together in memory and keep them apart again: on the canvas itself that is this
rule, and nothing has to be shifted.

>>> from flexsparse.viz import picture
>>> print(picture(ShiftedWindow(canvas=(2, 4), window=(2, 2), shift=(0, 1)), 8))
#...#...
.##..##.
.##..##.
...#...#
#...#...
.##..##.
.##..##.
...#...#
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.canvas import coordinates
from flexsparse.errors import RuleError, check_lengths
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class ShiftedWindow(MaskRule):
    """Keys of the query's own window.

    ``canvas``: tokens along each of 1 to 3 axes, positions row-major; ``window``: tokens along each
    axis; ``shift``: tokens by which the windows stand aside, less than the window, 0 where left
    out. Positions past the canvas neither see nor are seen.
    """

    canvas: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_lengths("ShiftedWindow", "canvas", self.canvas, 1, None)
        check_lengths("ShiftedWindow", "window", self.window, 1, len(self.canvas))
        if self.shift is not None:
            check_lengths("ShiftedWindow", "shift", self.shift, 0, len(self.canvas))
            if any(s >= w for s, w in zip(self.shift, self.window, strict=True)):
                raise RuleError(
                    f"ShiftedWindow shift must be less than the window, got {self.shift} and "
                    f"{self.window}"
                )

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, kv = coordinates(q_idx, self.canvas), coordinates(kv_idx, self.canvas)
        seen = (q[0] >= 0) & (q[0] < self.canvas[0]) & (kv[0] < self.canvas[0])
        shift = (0,) * len(self.canvas) if self.shift is None else self.shift
        for at, key, size, aside in zip(q, kv, self.window, shift, strict=True):
            # A window more, so that the one before the first does not divide a negative number.
            ahead = size - aside
            seen = seen & ((at + ahead) // size == (key + ahead) // size)
        return seen
