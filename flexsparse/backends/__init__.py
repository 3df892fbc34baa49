"""Who runs a plan: each backend computes a Partial from packed tensors and a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexsparse.layout import Layout
from flexsparse.program import ScoreProgram


@dataclass(frozen=True)
class Call:
    """What is asked of a backend, known before any tensor is.

    ``scored``: a score rule changes scores; ``learned``: it holds tensors that want gradients;
    ``selected``: a selection says what is worth seeing.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    q_len: int
    grads: bool
    lse: bool
    scored: bool
    learned: bool
    selected: bool = False


class Work(NamedTuple):
    """A call in kernel coordinates: ``q [B, H, Q, D]``, ``k [B, G, S, D]``, ``v [B, G, S, Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    score: ScoreProgram | None
    score_tables: Sequence[Tensor]
    scale: float
    lse: bool
    grads: bool


class Effort(NamedTuple):
    """What a backend would multiply and move for a call: reckoned from counts, before anything is run."""

    flops: float
    bytes: float


class Backend(Protocol):
    """``refuses`` says in one sentence why a call cannot be run; ``run`` runs one it accepted."""

    name: str

    def refuses(self, call: Call) -> str | None: ...

    def run(self, work: Work) -> tuple[Tensor, Tensor | None]: ...
