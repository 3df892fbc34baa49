"""One row: run, checked, held against dense attention, counted and timed."""

from __future__ import annotations

import traceback
from typing import Any

from flexsparse.budget import Budget
from flexsparse.checking import Report, check
from flexsparse.device import Stages, compiles
from flexsparse.errors import FlexSparseError
from flexsparse.experiment.blame import said
from flexsparse.experiment.config import Config, as_fallback, as_tile
from flexsparse.experiment.load import Case
from flexsparse.experiment.model import QKV
from flexsparse.experiment.notes import notes
from flexsparse.experiment.quality import quality
from flexsparse.experiment.replaced import Replaced
from flexsparse.experiment.timing import time_plan
from flexsparse.measure.delivery import Dense, delivered
from flexsparse.parameters import describe, moved
from flexsparse.planning import make_plan
from flexsparse.rules import MaskRule


def run_row(
    case: Case,
    qkv: QKV,
    baseline: MaskRule | None,
    dense: Dense | Exception,
    config: Config,
    replaced: Replaced | None = None,
) -> dict[str, Any]:
    """What stands in ``rows.jsonl`` for this row; ``status`` is ok, wrong or failed.

    Times are in ms, ``budget`` counts over batch and query heads, errors are largest absolute
    differences. A failure is kept as its text. ``dense`` may be what went wrong with the baseline;
    ``replaced`` is the model whose perplexity is asked for.
    """
    row = case.row
    record: dict[str, Any] = {
        "name": row.name,
        "status": "ok",
        "error": None,
        "rule": None if case.rule is None else describe(case.rule),
        "select": None if case.select is None else describe(case.select),
        "score": None if case.score is None else describe(case.score),
    }
    try:
        if isinstance(dense, Exception):
            raise dense
        record["dense"] = vars(dense) | ({} if replaced is None else {"perplexity": replaced.own})
        record |= _measured(case, qkv, baseline, dense, config, replaced)
        record["notes"] = notes(record)
    except (Exception, SystemExit) as error:  # a script's exit ends its row, not the run
        told = said(error, case.rule, case.select)
        if error is dense:
            told = f"the baseline cannot run: {said(error, baseline, None)}"
        record |= {"status": "failed", "error": told}
        if not isinstance(error, FlexSparseError):
            record["traceback"] = "".join(traceback.format_exception(error))
    return record


def _measured(
    case: Case,
    qkv: QKV,
    baseline: MaskRule | None,
    dense: Dense,
    config: Config,
    replaced: Replaced | None,
) -> dict[str, Any]:
    row, (q, k, v) = case.row, qkv
    rule, select, score = (moved(x, q.device) for x in (case.rule, case.select, case.score))
    fallback = as_fallback(row.fallback)
    call: dict[str, Any] = {
        "rule": rule,
        "score": score,
        "q_offset": row.q_offset,
        "fallback": fallback,
    }
    forced: dict[str, Any] = {
        "backend": row.backend,
        "pack": row.pack,
        "tile": as_tile(row.tile),
        "split": row.split,
        "cluster": row.cluster,
    }
    before, first = int(compiles), Stages(q.device)
    with first.stage("first"):
        plan = make_plan(q, k, v, select=select, **call, **forced)
        plan.run(q, k, v)
    times, result = time_plan(plan, qkv, config.repeats)
    budget = result.budget()
    selection = result.layout.select
    found = {
        "plan": str(plan),
        "backend": plan.backend,
        "tile": list(plan.tile),
        "queries": plan.grid.q_len,
        "budget": _counts(budget, dense),
        "time_ms": times,
        "first_ms": 1e3 * first.seconds["first"],
        "compiles": int(compiles) - before,
    }
    found |= delivered(times, dense, budget.logical_pairs, budget.physical_pairs)
    found |= quality(
        qkv, result.out, plan.grid, baseline, rule=rule, select=selection, fallback=fallback
    )
    if replaced is not None:
        found["perplexity"] = replaced.measure(
            rule=rule, select=select, score=score, fallback=fallback, **forced
        )
    if config.check:
        sampled = None if config.check is True else config.check
        # The selection that was timed, not one chosen anew, is what the reference is asked about.
        report = check(q, k, v, select=selection, **call, **forced, rows=sampled, seed=config.seed)
        found["check"] = _checked(report)
        if not report.ok:
            found |= {
                "status": "wrong",
                "error": f"first difference: {report.stage}; {report.detail}",
            }
    return found


def _counts(budget: Budget, dense: Dense) -> dict[str, Any]:
    names = (
        "logical_pairs", "physical_pairs", "physical_tiles", "full_tiles", "partial_tiles",
        "counted", "inflation", "kv_bytes", "metadata_bytes", "useful_flops", "executed_flops",
    )  # fmt: skip
    counts = {name: getattr(budget, name) for name in names}
    return counts | {
        "of_dense": budget.logical_pairs / dense.pairs if dense.pairs else None,
        "rows": vars(budget.rows),
        "kv_bytes_if": vars(budget.kv_bytes_if),
        "metadata_bytes_if": vars(budget.metadata_bytes_if),
    }


def _checked(report: Report) -> dict[str, Any]:
    quantities = {
        d.name: {"error": d.error, "plain_error": d.plain_error, "budget": d.budget, "ok": d.ok}
        for d in report.differences
    }
    return {"rows": report.rows, "stage": report.stage, "quantities": quantities}
