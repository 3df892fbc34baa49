"""Neighborhood: the keys around the query on a line, an image or a video.

Source: Hassani et al., "Neighborhood Attention Transformer", 2022, 3.1,
https://arxiv.org/abs/2204.07143; dilated in Hassani and Shi, 2022,
https://arxiv.org/abs/2209.15001.

Known elsewhere as: ``na1d``, ``na2d`` and ``na3d`` of NATTEN (not causal, stride 1), whose border this
has: near it the window is moved inside, so that every query sees exactly its size.

>>> from flexsparse.viz import picture
>>> print(picture(Neighborhood(canvas=(3, 4), kernel=(2, 3)), 12))
###.###.....
###.###.....
.###.###....
.###.###....
###.###.....
###.###.....
.###.###....
.###.###....
....###.###.
....###.###.
.....###.###
.....###.###
"""

from dataclasses import dataclass, field

from torch import Tensor

from flexsparse.canvas import coordinates, in_shifted_window
from flexsparse.errors import RuleError, check_lengths
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class Neighborhood(MaskRule):
    """The ``kernel`` around the query, moved inside the canvas at its borders.

    ``canvas``: tokens along each of 1 to 3 axes, such as (frames, height, width), positions
    row-major; ``kernel``: keys along each axis, an even one reaching farther back than ahead;
    ``dilation``: tokens from one key to the next, along each axis, 1 where left out. Positions past
    the canvas neither see nor are seen.
    """

    canvas: tuple[int, ...]
    kernel: tuple[int, ...]
    dilation: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        check_lengths("Neighborhood", "canvas", self.canvas, 1, None)
        check_lengths("Neighborhood", "kernel", self.kernel, 1, len(self.canvas))
        dilation = self.dilation or (1,) * len(self.canvas)
        check_lengths("Neighborhood", "dilation", dilation, 1, len(self.canvas))
        sizes = zip(self.canvas, self.kernel, dilation, strict=True)
        if any(size * step > length for length, size, step in sizes):
            raise RuleError(
                "Neighborhood kernel times dilation must fit into the canvas, got "
                f"{self.kernel} times {dilation} in {self.canvas}"
            )

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, kv = coordinates(q_idx, self.canvas), coordinates(kv_idx, self.canvas)
        seen = (q[0] >= 0) & (q[0] < self.canvas[0])
        steps = self.dilation or (1,) * len(self.canvas)
        for at, key, length, size, step in zip(q, kv, self.canvas, self.kernel, steps, strict=True):
            if step == 1:
                seen = seen & in_shifted_window(at, key, size, length)
                continue
            # Every residue of the step is an axis of its own, some a token shorter than others.
            line = (length - 1 - at % step) // step + 1
            near = in_shifted_window(at // step, key // step, size, line)
            seen = seen & near & (at % step == key % step)
        return seen
