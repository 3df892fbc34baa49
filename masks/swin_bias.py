"""Swin bias: a learned bias for each head and offset between two tokens of a window.

Source: Liu et al., "Swin Transformer", 2021, 3.2 (relative position bias, equation 4),
https://arxiv.org/abs/2103.14030.

Known elsewhere as: ``relative_position_bias_table`` of Swin, ``[(2M-1)**2, Hq]`` there:
``table.T.view(Hq, 2 * M - 1, 2 * M - 1)`` is the bias here.

>>> import torch
>>> score = SwinBias(torch.arange(9.0).view(1, 3, 3), canvas=(4, 4))
>>> at = torch.tensor
>>> score(at(0.0), at(0), at(0), at(0), at(5)).item()
0.0
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.canvas import coordinates
from flexsparse.errors import RuleError, check_lengths, check_table
from flexsparse.scores import ScoreRule

_FORMS = ("[Hq, 2M-1]", "[Hq, 2M-1, 2M-1]", "[Hq, 2P-1, 2M-1, 2M-1]")


@dataclass(frozen=True, eq=False)
class SwinBias(ScoreRule):
    """Adds ``bias[h, dy + M - 1, dx + M - 1]``, (dy, dx) from key to query; for `ShiftedWindow`.

    ``bias``: float ``[Hq, 2M-1, 2M-1]`` for windows of M by M tokens, an axis more or less for
    videos and lines; ``canvas``: tokens along each axis. Offsets longer than a window take the
    table's nearest end. A tensor that requires gradients is learned.
    """

    bias: Tensor
    canvas: tuple[int, ...]

    def __post_init__(self) -> None:
        check_table("SwinBias", "bias", self.bias, "float", *_FORMS)
        check_lengths("SwinBias", "canvas", self.canvas, 1, self.bias.ndim - 1)
        if any(n % 2 == 0 for n in self.bias.shape[1:]):
            raise RuleError(
                "SwinBias bias must have 2M-1 entries along each axis, an odd number, got "
                f"{list(self.bias.shape)}"
            )

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        q, kv = coordinates(q_idx, self.canvas), coordinates(kv_idx, self.canvas)
        offsets = [h]
        for at, key, entries in zip(q, kv, self.bias.shape[1:], strict=True):
            offsets.append((at - key + entries // 2).clamp(0, entries - 1))
        return score + self.bias[tuple(offsets)]
