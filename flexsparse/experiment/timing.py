"""Where the time of a call goes, beside the best dense attention of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexsparse.device import Stages
from flexsparse.experiment.model import QKV
from flexsparse.masks.causal import Causal
from flexsparse.measure.delivery import Dense
from flexsparse.parameters import describe
from flexsparse.plan import Plan
from flexsparse.planning import make_plan
from flexsparse.result import Result
from flexsparse.rules import MaskRule


def time_dense(qkv: QKV, baseline: MaskRule | None, q_offset: int | None, repeats: int) -> Dense:
    """Dense attention under ``baseline``, by torch where torch has it, and by this library.

    Only the kernels count: a dense layout never changes.
    """
    q, k, v = qkv
    plan = make_plan(q, k, v, rule=baseline, q_offset=q_offset)
    assert plan.first is not None
    timed = [(_median(lambda: plan.run(q, k, v), q.device, repeats), f"flexsparse {plan.backend}")]
    square = q.shape[2] == k.shape[2] and q_offset in (None, 0)
    if baseline is None or (isinstance(baseline, Causal) and square):
        grouped, causal = q.shape[1] != k.shape[1], baseline is not None

        def sdpa() -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        timed.append((_median(sdpa, q.device, repeats), "torch SDPA"))
    ms, by = min(timed)
    name = "no mask" if baseline is None else describe(baseline)
    return Dense(ms, by, int(plan.first.logical_pairs), name, q_offset)


def time_plan(plan: Plan, qkv: QKV, repeats: int) -> tuple[dict[str, Any], Result]:
    """Medians in ms of ``index`` (the selector), ``layout``, ``movement`` (tensors that had to be
    copied for the kernel) and ``kernel``; ``total`` with its 20th and 80th percentile."""
    _step(plan, qkv)
    runs = []
    for _ in range(repeats):
        result, taken = _step(plan, qkv)
        runs.append({name: 1e3 * seconds for name, seconds in taken.items()})
    times: dict[str, Any] = {
        name: statistics.median(run.get(name, 0.0) for run in runs)
        for name in ("index", "layout", "movement", "kernel")
    }
    totals = sorted(run.get("index", 0.0) + run["layout"] + run["whole"] for run in runs)
    times["total"] = statistics.median(totals)
    times["total_p20"], times["total_p80"] = (
        totals[round(part * (len(totals) - 1))] for part in (0.2, 0.8)
    )
    times["repeats"] = repeats
    return times, result


def _step(plan: Plan, qkv: QKV) -> tuple[Result, dict[str, float]]:
    """One call, and the seconds of each of its stages."""
    q, k, v = qkv
    stages = Stages(plan.device)
    selection = None if plan.first is None else plan.first.select
    if plan.selector is not None:
        with stages.stage("index"):
            selection = plan.selector.select(q, k, plan.grid, plan.rule)
    with stages.stage("layout"):
        layout = plan.layout(selection)
    with stages.stage("packing"):
        packed = [plan.address.pack(x, name) for x, name in zip(qkv, "qkv", strict=True)]
    with stages.stage("whole"):
        result = plan.run(q, k, v, layout)
    # The run packs too. Views are free: only what was copied is movement.
    copied = any(x.data_ptr() != y.data_ptr() for x, y in zip(packed, qkv, strict=True))
    seconds = stages.seconds
    seconds["movement"] = seconds["packing"] if copied else 0.0
    seconds["kernel"] = max(0.0, seconds["whole"] - seconds["movement"])
    return result, seconds


def _median(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """ms of a call after one that warms up."""
    call()
    taken = []
    for _ in range(repeats):
        stages = Stages(device)
        with stages.stage("call"):
            call()
        taken.append(1e3 * stages.seconds["call"])
    return statistics.median(taken)
