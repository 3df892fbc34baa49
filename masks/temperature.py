"""Temperature: scores divided by a temperature, one for all heads or of each head's own.

Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, 2 (the softmax's
temperature), https://arxiv.org/abs/1503.02531; learned for each head in Liu et al., "Swin
Transformer V2", 2021, 3.2 (scaled cosine attention), https://arxiv.org/abs/2111.09883.

Known elsewhere as: tau, logit scale (its inverse). It acts on scores that ``scale`` has scaled already.

>>> import torch
>>> score = Temperature(0.5)
>>> zero = torch.tensor(0)
>>> score(torch.tensor(3.0), zero, zero, zero, zero).item()
6.0
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import ArgumentError, check_per_head
from flexsparse.rules import of_head
from flexsparse.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class Temperature(ScoreRule):
    """``score / temperature``: below 1 sharpens, above 1 flattens.

    ``temperature``: a positive number, or float ``[Hq]``; a tensor that requires gradients is
    learned.
    """

    temperature: float | Tensor

    def __post_init__(self) -> None:
        check_per_head("Temperature", "temperature", self.temperature, float, -float("inf"))
        given = self.temperature
        coldest = float(given.detach().min()) if isinstance(given, Tensor) else given
        if not coldest > 0:
            raise ArgumentError(f"Temperature temperature must be positive, got {coldest}")

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return score / of_head(self.temperature, h)
