"""ALiBi: a bias that falls with distance, at a slope of its own for each head.

Source: Press et al., "Train Short, Test Long", 2021, 3, https://arxiv.org/abs/2108.12409.

Known elsewhere as: ``alibi_slopes`` of FlashAttention (whose bias falls for keys after the query too),
linear biases of BLOOM and MPT.

>>> import torch
>>> at = torch.tensor
>>> score = Alibi(at([0.5]))
>>> score(at(0.0), at(0), at(0), at(5), at(2)).item()
-1.5
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError
from flexsparse.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class Alibi(ScoreRule):
    """Adds ``slopes[h] * (key position - query position)``.

    ``slopes``: float ``[Hq]``; a tensor that requires gradients is learned.
    """

    slopes: Tensor

    def __post_init__(self) -> None:
        given = self.slopes
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim != 1:
            raise ArgumentError(
                "Alibi slopes must be a float tensor [Hq]: Alibi.of_heads(n) makes the paper's"
            )

    @staticmethod
    def of_heads(heads: int) -> "Alibi":
        """The paper's slopes: a geometric series from ``2 ** (-8 / heads)`` (powers of two)."""
        return Alibi(torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads))

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return score + self.slopes[h] * (kv_idx - q_idx)
