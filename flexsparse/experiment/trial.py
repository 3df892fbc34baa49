"""A rule, score or selector tried on small random inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flexsparse.checking import Report, check
from flexsparse.errors import ArgumentError, ConfigError
from flexsparse.experiment.blame import blamed
from flexsparse.experiment.build import build_part
from flexsparse.experiment.config import Input, RandomInput
from flexsparse.experiment.inputs import load_inputs
from flexsparse.experiment.source import Source
from flexsparse.masks.causal import Causal
from flexsparse.resolve import kind_of
from flexsparse.rules import as_rule
from flexsparse.viz import picture

# One past a block, so that every last tile is ragged; two batches and grouped heads.
SHAPE = RandomInput(batch=2, heads=4, kv_heads=2, q_len=65, head_dim=16)
_SHOWN = 16


def trial(name: str, arguments: Iterable[str]) -> tuple[Report, str]:
    """The report over out, lse and all gradients, and a picture where a rule has one.

    ``arguments`` are ``key=value``. Scores and selectors are tried under a causal rule.
    """
    given = Source("", {})
    for argument in arguments:
        given.override(argument)
    given.raise_noted()
    made = build_part({name: given.data} if given.data else name, None, (), given)
    if given.problems:
        # Here is no file to point into: the argument's name is the place.
        told = (f"{at[-1]}: {said}" if len(at) > 1 else said for at, said in given.problems)
        raise ConfigError("\n".join(told))
    if isinstance(made, type):
        made = made()
    kind = kind_of(made)
    q, k, v = load_inputs(Input(random=SHAPE), torch.float32, torch.device("cpu"), seed=0)
    if kind is None:
        raise ArgumentError(
            f"{name} must be a rule, a score or a selector, got {type(made).__name__}"
        )
    call: dict[str, Any] = {"rule": Causal()} | {"select" if kind == "selector" else kind: made}
    try:
        report = check(q, k, v, **call, grads=True)
        return report, picture(made, _SHOWN) if kind == "rule" else ""
    except Exception as error:
        found = blamed(error, as_rule(call["rule"]), call.get("select"))
        if found is None or found is error:
            raise
        raise found from error
