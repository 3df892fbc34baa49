"""Who runs a plan: each backend computes a Partial from packed tensors and a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexsparse.layout import Layout
from flexsparse.program import MaskProgram, ScoreProgram


@dataclass(frozen=True)
class Call:
    """What is asked of a backend, known before any tensor is.

    ``learned``: the score rule holds tensors that want gradients.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    q_len: int
    grads: bool
    lse: bool
    learned: bool
    program: MaskProgram
    score: ScoreProgram | None

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.program.address.group

    @property
    def scored(self) -> bool:
        """Whether a score rule changes scores."""
        return self.score is not None

    @property
    def selected(self) -> bool:
        """Whether a selection says what is worth seeing."""
        return self.program.member is not None


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


class Backend(Protocol):
    """``refuses`` says in one sentence why a call cannot be run; ``tile_for`` is the tile that it can
    use, at least as large as the one wanted, and why; ``run`` runs a call it accepted."""

    name: str

    def refuses(self, call: Call) -> str | None: ...

    def tile_for(self, tile: tuple[int, int], call: Call) -> tuple[int, int]: ...

    def run(self, work: Work) -> tuple[Tensor, Tensor | None]: ...
