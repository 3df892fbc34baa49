"""Whether the attention of a row is right, before it is timed."""

from __future__ import annotations

from typing import Any

from flexsparse.checking import check
from flexsparse.choice import BackendName, Pack
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.unlisted import unlisted


def judged(
    made: Conversion, rows: int, seed: int, backend: BackendName, pack: Pack | None
) -> tuple[dict[str, Any], str | None]:
    """``check`` on that many query rows, gradients too where the problem is of training, and what
    tiles filled with NaN change; and in one sentence what is wrong."""
    problem, plan, qkv = made.problem, made.plan, made.qkv
    assert plan is not None and qkv is not None
    report = check(
        *(x.detach() for x in qkv),
        rule=problem.rule, select=problem.select(), tile=problem.tile, backend=backend, pack=pack,
        grads=problem.training, rows=rows, seed=seed,
    )  # fmt: skip
    out = report["out"]
    hidden = unlisted(made)
    found = {
        "plan": str(plan),
        "backend": plan.backend,
        "tile": list(plan.tile),
        "check": {
            "ok": report.ok,
            "rows": report.rows,
            "error": out.error,
            "plain_error": out.plain_error,
            "errors": {d.name: [d.error, d.plain_error, d.budget] for d in report.differences},
            "detail": report.detail,
        },
        "unlisted": hidden,
    }
    if (report.plan.backend, report.plan.tile) != (plan.backend, plan.tile):
        return found, f"checked was {report.plan.backend}, but what is timed is {plan.backend}"
    if not report.ok:
        return found, f"attention differs from the reference: {report.detail}"
    if hidden["equal"] is False:
        return found, "NaN in tiles that are not listed changed the output: they were read"
    return found, None
