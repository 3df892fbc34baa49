"""A rule, score or selector tried on small random inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from flexsparse.checking import Report, check
from flexsparse.errors import ArgumentError
from flexsparse.experiment.blame import blamed
from flexsparse.experiment.config import Input, RandomInput
from flexsparse.experiment.inputs import load_inputs
from flexsparse.experiment.model import QKV
from flexsparse.experiment.named import named
from flexsparse.grid import Grid
from flexsparse.masks.causal import Causal
from flexsparse.resolve import kind_of
from flexsparse.rules import as_rule
from flexsparse.selectors.base import Selector

# One past a block, so that every last tile is ragged; two batches and grouped heads.
SHAPE = RandomInput(batch=2, heads=4, kv_heads=2, q_len=65, head_dim=16)
# Small enough that there are several a side: full ones, partial ones and none.
_TILE, _TILE_OF_LONG = 16, 64
# Where nobody says how many tokens, a selector leaves out this share of the pairs at least, if it
# does so at this length or before.
_LEFT_OUT, _LONGEST = 0.01, 2049


class Trial(NamedTuple):
    """A report, and of a selector the share of the rule's pairs that it left out."""

    report: Report
    left_out: float | None

    @property
    def warning(self) -> str | None:
        """What the report does not prove."""
        if self.left_out != 0:
            return None
        return (
            f"nothing was left out: the selector kept every block within reach at {self.report.rows} "
            "tokens, so nothing that it skips was proved: give more --tokens, or a smaller keep or block"
        )


def trial(name: str, arguments: Iterable[str], tokens: int | None = None) -> Trial:
    """The report over out, lse and all gradients.

    ``arguments`` are ``key=value``. Scores and selectors are tried under a causal rule. Without
    ``tokens`` there are 65, for a selector as many as it needs to leave something out.
    """
    made = named(name, arguments)
    kind = kind_of(made)
    if kind is None:
        raise ArgumentError(
            f"{name} must be a rule, a score or a selector, got {type(made).__name__}"
        )
    left_out = None
    if kind == "selector":
        tokens, left_out = _length(made, tokens)
    q, k, v = _inputs(tokens or SHAPE.q_len)
    call: dict[str, Any] = {"rule": Causal()} | {"select" if kind == "selector" else kind: made}
    tile = _TILE if q.shape[2] <= 256 else _TILE_OF_LONG
    try:
        return Trial(check(q, k, v, **call, grads=True, tile=tile), left_out)
    except Exception as error:
        found = blamed(error, as_rule(call["rule"]), call.get("select"))
        if found is None or found is error:
            raise
        raise found from error


def _length(selector: Selector, tokens: int | None) -> tuple[int, float | None]:
    """How many tokens, and the share of pairs left out there; None where it could not be seen."""
    first: float | None = None
    for n in _lengths() if tokens is None else [tokens]:
        try:
            left_out = _left_out(selector, n)
        except Exception:
            # The check itself will tell, if it meets the same.
            break
        first = left_out if first is None else first
        if tokens is not None or left_out >= _LEFT_OUT:
            return n, left_out
    return tokens or SHAPE.q_len, first


def _lengths() -> Iterator[int]:
    n = SHAPE.q_len
    while n <= _LONGEST:
        yield n
        n += max(64, n // 4 // 64 * 64)


def _left_out(selector: Selector, n: int) -> float:
    q, k, _ = _inputs(n)
    grid = Grid(n, n, batch=SHAPE.batch)
    kept = selector.select(q, k, grid, Causal()).dense()
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    return 1 - float((kept & causal).double().sum() / causal.expand_as(kept).double().sum())


def _inputs(tokens: int) -> QKV:
    shape = SHAPE.model_copy(update={"q_len": tokens})
    return load_inputs(Input(random=shape), torch.float32, torch.device("cpu"), seed=0)
