"""How much of the promised speedup arrived: attention with its conversion, beside dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexsparse.checking import check
from flexsparse.device.clock import device_ms
from flexsparse.errors import BackendError
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.cost import first_line

QKV = tuple[Tensor, Tensor, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# Query rows that meet the reference before anything is timed.
_CHECKED = 64
_KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


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


def attended(made: Conversion, seed: int) -> dict[str, Any]:
    """Attention over the conversion, checked and timed: ``forward``, and where the problem is of
    training ``training``, forward and backward. Each has its dense times by kernel."""
    problem, plan, qkv = made.problem, made.plan, made.qkv
    assert plan is not None and qkv is not None
    select = problem.select()
    layout = plan.layout(select)
    report = check(
        *(x.detach() for x in qkv),
        rule=problem.rule, select=select, tile=problem.tile, rows=_CHECKED, seed=seed,
    )  # fmt: skip
    out = report["out"]
    budget = layout.budget()
    pairs = (budget.logical_pairs, budget.physical_pairs)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plan.run(q, k, v, layout).out

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plan.run(q, k, v, plan.layout(problem.select())).out

    found: dict[str, Any] = {
        "plan": str(plan),
        "check": {
            "ok": report.ok,
            "error": out.error,
            "plain_error": out.plain_error,
            "detail": report.detail,
        },
        "inflation": budget.inflation,
    }
    for mode in ("forward", "training") if problem.training else ("forward",):
        timed = _forward if mode == "forward" else _training
        dense = _dense(made, qkv, timed)
        ms = {name: time for name, time in dense.items() if isinstance(time, float)}
        if not ms:
            raise BackendError(f"no dense attention of torch runs here: {dense}")
        fastest, by = min((t, name) for name, t in ms.items())
        against = "causal" if problem.causal else "no mask"
        best = Dense(fastest, by, problem.dense_pairs, against, None)
        times = {
            "kernel": timed(kernel, qkv, problem.device),
            "total": timed(total, qkv, problem.device),
        }
        found[mode] = {"dense_ms": dense, "dense": vars(best), "time_ms": times}
        found[mode] |= delivered(times, best, *pairs)
    return found


def _forward(attend: Attention, qkv: QKV, device: torch.device) -> float:
    with torch.no_grad():
        return device_ms(lambda: attend(*qkv), device)


def _training(attend: Attention, qkv: QKV, device: torch.device) -> float:
    leaves = [x.detach().requires_grad_() for x in qkv]
    flow = torch.ones_like(qkv[0])
    return device_ms(
        lambda: torch.autograd.grad(attend(leaves[0], leaves[1], leaves[2]), leaves, flow), device
    )


def _dense(
    made: Conversion, qkv: QKV, timed: Callable[[Attention, QKV, torch.device], float]
) -> dict[str, float | str]:
    """ms of each of torch's dense kernels, or why it does not run."""
    problem = made.problem
    grouped = problem.heads[0] != problem.heads[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=grouped)

    if problem.device.type != "cuda":
        return {"torch SDPA": timed(attend, qkv, problem.device)}
    found: dict[str, float | str] = {}
    for name, kernel in _KERNELS.items():
        try:
            with sdpa_kernel(kernel):
                found[name] = timed(attend, qkv, problem.device)
        except RuntimeError as error:
            found[name] = first_line(error)
    return found
