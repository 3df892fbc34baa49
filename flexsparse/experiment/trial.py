"""A rule, score or selector tried on small random inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flexsparse.checking import Report, check
from flexsparse.errors import ArgumentError, ConfigError
from flexsparse.experiment.build import build_part
from flexsparse.experiment.config import Input, RandomInput
from flexsparse.experiment.inputs import load_inputs
from flexsparse.experiment.source import At, Source
from flexsparse.masks.causal import Causal
from flexsparse.resolve import kind_of
from flexsparse.viz import picture

# One past a block, so that every last tile is ragged; two batches and grouped heads.
SHAPE = RandomInput(batch=2, heads=4, kv_heads=2, q_len=65, head_dim=16)
_SHOWN = 16


def trial(name: str, arguments: Iterable[str]) -> tuple[Report, str]:
    """The report over out, lse and all gradients, and a picture where a rule has one.

    ``arguments`` are ``key=value``. Scores and selectors are tried under a causal rule.
    """
    given = Source(name, {})
    for argument in arguments:
        given.override(argument)
    problems: list[str] = []

    def note(at: At, message: str) -> None:
        problems.append(f"{at[-1]}: {message}" if len(at) > 1 else message)

    made = build_part({name: given.data} if given.data else name, None, (), note)
    if problems:
        raise ConfigError("\n".join(problems))
    if isinstance(made, type):
        made = made()
    kind = kind_of(made)
    q, k, v = load_inputs(Input(random=SHAPE), torch.float32, torch.device("cpu"), seed=0)
    if kind == "rule":
        return check(q, k, v, rule=made, grads=True), picture(made, _SHOWN)
    if kind == "score":
        return check(q, k, v, rule=Causal(), score=made, grads=True), ""
    if kind == "selector":
        return check(q, k, v, rule=Causal(), select=made, grads=True), ""
    raise ArgumentError(f"{name} must be a rule, a score or a selector, got {type(made).__name__}")
