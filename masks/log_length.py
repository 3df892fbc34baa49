"""Log length: scores grow with the logarithm of the query's position, so that attention stays sharp.

Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025, 2,
https://arxiv.org/abs/2501.19399; without the factor in Chiang and Cholak, "Overcoming a Theoretical
Limitation of Self-Attention", 2022, https://arxiv.org/abs/2202.12172.

Known elsewhere as: SSMax, log-n scaling, scaled softmax attention. For causal rules: a query at
position p has p + 1 keys before it and with it, whatever else the rule hides.

>>> import torch
>>> score = LogLength(1.0)
>>> at = torch.tensor
>>> round(score(at(2.0), at(0), at(0), at(99), at(0)).item(), 4)
9.2103
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import check_per_head
from flexsparse.rules import of_head
from flexsparse.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class LogLength(ScoreRule):
    """``score * factor * log(position + 1)``.

    ``factor``: a number, or float ``[Hq]``, the paper's s; a tensor that requires gradients is
    learned.
    """

    factor: float | Tensor

    def __post_init__(self) -> None:
        check_per_head("LogLength", "factor", self.factor, float, -float("inf"))

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return score * of_head(self.factor, h) * torch.log(q_idx.clamp(min=0) + 1)
