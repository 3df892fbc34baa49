"""What a plan and what it gives say of themselves, in lines and in few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flexsparse.parameters import describe
from flexsparse.selection import Selection

if TYPE_CHECKING:
    from flexsparse.plan import Plan

# What chooses anew for a plan that holds a selector's choice.
ANEW = "plan.layout(selector.select(q, k, plan.grid, plan.rule))"


def rows(plan: Plan) -> list[tuple[str, str]]:
    """The lines of ``print(plan)``, each with its name."""
    return [
        ("rule", "none" if plan.rule is None else describe(plan.rule)),
        ("select", _chosen(plan)),
        ("score", "none" if plan.score is None else describe(plan.score)),
        ("backend", f"{plan.backend}, {plan.reads}, {plan.address}"),
        *(("because", why) for why in plan.reasons),
    ]


def lines(plan: Plan) -> str:
    q_heads, kv_heads, head_dim = plan.shape[:3]
    head = (
        f"Plan for {plan.grid}, {q_heads} query and {kv_heads} KV heads of {head_dim}, "
        f"{str(plan.dtype).removeprefix('torch.')} on {plan.device}"
    )
    return "\n".join([head, *(f"  {name:8} {value}" for name, value in rows(plan))])


def _chosen(plan: Plan) -> str:
    if plan.selector is not None:
        return (
            f"{describe(plan.selector)}, which chose once, for the q and k this plan was made with: "
            f"{ANEW} chooses anew"
        )
    if plan.program.member is None:
        return "none"
    return "a Selection" if plan.first is None else selected(plan.first.select)


def selected(select: Selection | None) -> str:
    """A selection in words, from its shape alone."""
    if select is None:
        return "none"
    kept = min(select.shape[-1], select.candidates)
    keys = "keys" if select.kv_block == 1 else f"blocks of {select.kv_block} keys"
    queries = "query" if select.q_block == 1 else f"{select.q_block} queries"
    return f"at most {kept} of {select.candidates:,} {keys} for each {queries}"


def tensor(x: Tensor) -> str:
    """Shape, dtype and device.

    >>> import torch
    >>> tensor(torch.zeros(2, 3))
    '[2, 3] float32 on cpu'
    """
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"
