"""A rule, score or selector tried on small random inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flexsparse.checking import Report, check
from flexsparse.errors import ArgumentError
from flexsparse.experiment.blame import blamed
from flexsparse.experiment.config import Input, RandomInput
from flexsparse.experiment.inputs import load_inputs
from flexsparse.experiment.named import named
from flexsparse.masks.causal import Causal
from flexsparse.resolve import kind_of
from flexsparse.rules import as_rule

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
    if kind is None:
        raise ArgumentError(
            f"{name} must be a rule, a score or a selector, got {type(made).__name__}"
        )
    call: dict[str, Any] = {"rule": Causal()} | {"select" if kind == "selector" else kind: made}
    try:
        return check(q, k, v, **call, grads=True, tile=_TILE)
    except Exception as error:
        found = blamed(error, as_rule(call["rule"]), call.get("select"))
        if found is None or found is error:
            raise
        raise found from error
