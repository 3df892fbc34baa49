"""A rule, score or selector tried on small random inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flexsparse.checking import Report, check
from flexsparse.errors import ArgumentError
from flexsparse.experiment.config import Input, RandomInput
from flexsparse.experiment.inputs import load_inputs
from flexsparse.experiment.named import named
from flexsparse.masks.causal import Causal
from flexsparse.resolve import kind_of

# One past a block, so that every last tile is ragged; two batches and grouped heads.
SHAPE = RandomInput(batch=2, heads=4, kv_heads=2, q_len=65, head_dim=16)
# Small enough that there are several a side: full ones, partial ones and none.
_TILE = 16


def trial(name: str, arguments: Iterable[str]) -> Report:
    """The report over out, lse and all gradients.

    ``arguments`` are ``key=value``. Scores and selectors are tried under a causal rule.
    """
    made = named(name, arguments)
    kind = kind_of(made)
    q, k, v = load_inputs(Input(random=SHAPE), torch.float32, torch.device("cpu"), seed=0)
    if kind == "rule":
        return check(q, k, v, rule=made, grads=True, tile=_TILE)
    if kind == "score":
        return check(q, k, v, rule=Causal(), score=made, grads=True, tile=_TILE)
    if kind == "selector":
        return check(q, k, v, rule=Causal(), select=made, grads=True, tile=_TILE)
    raise ArgumentError(f"{name} must be a rule, a score or a selector, got {type(made).__name__}")
