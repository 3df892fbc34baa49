"""Head bias: a learned bias for each head and distance, one entry a relative position.

Source: Shaw et al., "Self-Attention with Relative Position Representations", 2018, in the additive
form of Raffel et al., "T5", 2020, 2.1 (without its logarithmic buckets: those are `T5Bias`),
https://arxiv.org/abs/1803.02155.

Known elsewhere as: relative position bias, relative attention bias.

>>> import torch
>>> at = torch.tensor
>>> score = HeadBias(torch.tensor([[0.0, 1.0, 2.0]]))
>>> score(at(0.0), at(0), at(0), at(9), at(4)).item()
2.0
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_table
from flexsparse.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class HeadBias(ScoreRule):
    """Adds ``bias[h, d]``, d being how far the key lies behind the query.

    ``bias``: float ``[Hq, distances]``. Distances outside the table take its nearest end. A tensor
    that requires gradients is learned.
    """

    bias: Tensor

    def __post_init__(self) -> None:
        check_table("HeadBias", "bias", self.bias, "float", "[Hq, distances]")

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        distance = (q_idx - kv_idx).clamp(0, self.bias.shape[1] - 1)
        return score + self.bias[h, distance]
