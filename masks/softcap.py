"""Softcap: scores bent to stay within a cap.

Source: Gemma Team, "Gemma 2", 2024, 2 (logit soft-capping), https://arxiv.org/abs/2408.00118;
Bello et al., "Neural Combinatorial Optimization", 2016, A.1, https://arxiv.org/abs/1611.09940.

Known elsewhere as: logit soft-capping, ``attn_logit_softcapping`` of Gemma 2 (50), ``max_attn_val`` of
Grok-1 (30), ``softcap`` of FlashAttention.

>>> import torch
>>> score = Softcap(2.0)
>>> zero = torch.tensor(0)
>>> round(score(torch.tensor(100.0), zero, zero, zero, zero).item(), 4)
2.0
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, check_number
from flexsparse.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class Softcap(ScoreRule):
    """``cap * tanh(score / cap)``; ``cap``: in units of the scaled score, positive. Masking comes after it, so that nothing hidden leaks through."""

    cap: float

    def __post_init__(self) -> None:
        check_number("Softcap", "cap", self.cap, float, -float("inf"))
        if not isinstance(self.cap, Tensor) and not self.cap > 0:
            raise ArgumentError(f"Softcap cap must be positive, got {self.cap}")

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap
