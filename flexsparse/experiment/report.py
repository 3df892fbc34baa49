"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flexsparse.experiment.journal import write_whole
from flexsparse.experiment.pareto import picture
from flexsparse.experiment.table import QUESTION, lines, tables
from flexsparse.experiment.verdict import baseline, noted, verdict

STAGES = ("index", "layout", "movement", "kernel")


def write_report(
    path: Path,
    name: str,
    rows: list[dict[str, Any]],
    environment: dict[str, Any],
    config: str,
) -> None:
    """``rows`` as they stand in ``rows.jsonl``; ``config`` as YAML."""
    template = files("flexsparse.experiment").joinpath("report.html").read_text(encoding="utf-8")
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page.filters["brief"] = lambda value: "not finite" if value is None else f"{value:.3g}"
    finished = [row for row in rows if row["status"] != "failed"]
    text = page.from_string(template).render(
        name=name,
        question=QUESTION,
        verdict=verdict(rows),
        baseline=baseline(rows),
        tables=[
            {"title": title, "columns": columns, "rows": lines(rows, columns)}
            for title, columns in tables(rows)
        ],
        notes=noted(rows),
        pareto=picture(finished),
        bars=_bars(finished),
        stages=STAGES,
        stacks=_stacks(finished),
        rows=rows,
        environment=environment,
        config=config,
    )
    write_whole(path, text)


def _bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Promised and real speed beside dense attention, as widths in per cent of the widest."""
    known = [row for row in rows if row["promised"] is not None and row["got"] is not None]
    widest = max((max(row["promised"], row["got"], 1.0) for row in known), default=1.0)
    return [
        {
            "name": row["name"],
            "promised": row["promised"],
            "got": row["got"],
            "widths": [100 * row[key] / widest for key in ("promised", "got")],
            "dense": 100 / widest,
        }
        for row in known
    ]


def _stacks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The time of each stage, as widths in per cent of the longest row or of dense."""
    ends = [(row["dense"]["ms"], sum(row["time_ms"][s] for s in STAGES)) for row in rows]
    longest = max(map(max, ends), default=0.0) or 1.0
    return [
        {
            "name": row["name"],
            "total": row["time_ms"]["total"],
            "parts": [(s, row["time_ms"][s], 100 * row["time_ms"][s] / longest) for s in STAGES],
            "dense": 100 * row["dense"]["ms"] / longest,
        }
        for row in rows
    ]
