"""A decode step as a server runs it: eager and in a CUDA graph, beside dense attention in one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from flexsparse.device.clock import Call
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.cost import cost, first_line
from flexsparse.measure.timed import KERNELS, sdpa


def steps(made: Conversion) -> list[dict[str, Any]]:
    """Attention by itself, with its layout, and from scores of pages on; then torch's dense kernels.

    Each with its ``cost``, or in ``reason`` why it does not run.
    """
    problem, plan, qkv = made.problem, made.plan, made.qkv
    assert plan is not None and qkv is not None
    q, k, v = (x.detach() for x in qkv)
    dense = sdpa(problem.causal, problem.heads)

    def selected() -> object:
        return plan.run(q, k, v, plan.layout(problem.select_anew()))

    calls: dict[str, Call] = {
        "attention": lambda: made.attend(q, k, v),
        "layout + attention": lambda: made.attend_anew(q, k, v),
        "top-k + layout + attention": selected,
    }
    found = [_step(what, call, made) for what, call in calls.items()]
    on_cuda = problem.device.type == "cuda"
    for name in KERNELS if on_cuda else ["torch SDPA"]:
        within = (lambda n=name: sdpa_kernel(KERNELS[n])) if on_cuda else nullcontext
        found.append(_step(f"dense, {name}", lambda: dense(q, k, v), made, within))
    return found


def _step(
    what: str, call: Call, made: Conversion, within: Callable[[], Any] = nullcontext
) -> dict[str, Any]:
    found: dict[str, Any] = {"what": what, "cost": None, "reason": None}
    try:
        with torch.no_grad(), within():
            found["cost"] = cost(call, made.problem.device)._asdict()
    except RuntimeError as error:
        if not what.startswith("dense"):
            raise
        found["reason"] = first_line(error)
    return found
