"""How much of the promised speedup arrived: attention with its conversion, beside dense attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexsparse.device.clock import device_ms
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.timed import MODES, by_kernel, fastest, sdpa

Found = dict[str, Any]


@dataclass(frozen=True)
class Dense:
    """The fastest dense baseline: its time in ms, who gave it, the pairs it needs, its rule and offset."""

    ms: float
    by: str
    pairs: int
    rule: str
    q_offset: int | None


def delivered(times: dict[str, Any], dense: Dense, logical: int, physical: int) -> dict[str, Any]:
    """How much of the promised speedup arrived, and the three factors it is the product of.

    ``times`` in ms: ``total`` with everything before the kernel, and ``kernel``.
    """
    promised = dense.pairs / logical if logical else None
    got = dense.ms / times["total"]
    whole = got / promised if promised else None
    selector = logical / physical if physical else None
    worktable = times["kernel"] / times["total"]
    kernel = whole / (selector * worktable) if whole and selector and worktable else None
    return {
        "promised": promised,
        "got": got,
        "delivered": whole,
        "factors": {"selector": selector, "worktable": worktable, "kernel": kernel},
    }


def modes(made: Conversion) -> tuple[str, ...]:
    """What of a problem is timed."""
    return ("forward", "training") if made.problem.training else ("forward",)


def dense_ms(made: Conversion) -> dict[str, dict[str, float | str]]:
    """By mode: ms of each of torch's dense kernels on the problem, or why it does not run."""
    problem, qkv = made.problem, made.qkv
    assert qkv is not None
    attend = sdpa(problem.causal, problem.heads)
    return {m: by_kernel(attend, qkv, problem.device, MODES[m]) for m in modes(made)}


def attended(made: Conversion, dense: dict[str, dict[str, float | str]]) -> Found:
    """Attention over the conversion, timed against ``dense``: ``forward``, and where the problem is of
    training ``training``, forward and backward. In ``time_ms`` ``total`` is all of a call at once,
    ``layout`` and ``kernel`` its parts by themselves."""
    problem, qkv = made.problem, made.qkv
    assert qkv is not None
    budget = made.budget
    pairs = (budget.logical_pairs, budget.physical_pairs)
    found: Found = {
        "counted": budget.counted,
        "inflation": budget.inflation,
        "logical_pairs": pairs[0],
        "physical_tiles": budget.physical_tiles,
        "row_tiles": vars(budget.rows),
    }
    layout = device_ms(made.before, problem.device)
    for mode, by in dense.items():
        timed = MODES[mode]
        times = {
            "layout": layout,
            "kernel": timed(made.attend, qkv, problem.device),
            "total": timed(made.attend_anew, qkv, problem.device),
        }
        ms, who = fastest(by)
        against = "causal" if problem.causal else "no mask"
        best = Dense(ms, who, problem.dense_pairs, against, None)
        found[mode] = {"dense_ms": by, "dense": vars(best), "time_ms": times}
        found[mode] |= delivered(times, best, *pairs)
    return found
