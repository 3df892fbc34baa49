"""Which of a few plans is the quickest on the tensors at hand: timed once for a kind of call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import Lock

import torch
from torch import Tensor

from flexsparse.device.clock import device_ms
from flexsparse.plan import Plan

_lock = Lock()
_timed: dict[Hashable, tuple[float, ...]] = {}


def timed_ms(plans: Sequence[Plan], q: Tensor, k: Tensor, v: Tensor) -> tuple[float, ...]:
    """Median ms of one run of each plan, with gradients where q, k or v want some; kept by shapes."""
    key = tuple(_kind(plan, q, k, v) for plan in plans)
    with _lock:
        known = _timed.get(key)
    if known is None:
        known = tuple(_run_ms(plan, q, k, v) for plan in plans)
        with _lock:
            _timed[key] = known
    return known


def _run_ms(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> float:
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
    wanted = [x for x in leaves if x.requires_grad] if torch.is_grad_enabled() else []

    def run() -> None:
        out = plan.run(leaves[0], leaves[1], leaves[2]).out
        if wanted:
            torch.autograd.grad(out.sum(), wanted)

    return device_ms(run, plan.device)


def _kind(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Hashable:
    """All that a time depends on but what is selected."""
    score = plan.score_program
    wants = tuple(x.requires_grad for x in (q, k, v)) if torch.is_grad_enabled() else ()
    forms = (
        plan.shape,
        plan.dtype,
        plan.grid.q_len,
        plan.grid.kv_len,
        plan.grid.batch,
        plan.device,
    )
    return (
        *forms,
        wants,
        plan.backend,
        plan.tile,
        plan.terms.cuts,
        plan.program.key,
        score and score.key,
    )
