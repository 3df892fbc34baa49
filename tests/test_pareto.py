"""Which rows no other beats in kept attention and physical pairs at once, and how the report shows it."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

from flexsparse.experiment import pareto
from flexsparse.experiment.load import load
from flexsparse.experiment.report import write_report
from flexsparse.experiment.verdict import front

CONFIGS = Path(__file__).parent.parent / "configs"


def row(name: str, mass: float | None, physical: int, **others: Any) -> dict[str, Any]:
    return {
        "name": name, "status": "ok", "mass_kept": mass, "pairs_outside": 0,
        "budget": {"physical_pairs": physical}, "dense": {"pairs": 200}, **others,
    }  # fmt: skip


def test_a_row_is_beaten_by_more_attention_for_no_more_pairs() -> None:
    rows = [
        row("cheap", 0.3, 20), row("same", 0.3, 20), row("worse", 0.2, 20), row("dear", 0.3, 40),
        row("good", 0.8, 100), row("wrong", 0.9, 10, status="wrong"), row("failed", 0.9, 10, status="failed"),
        row("beside", 0.9, 10, pairs_outside=3), row("unseen", None, 10),
    ]  # fmt: skip
    found = {point.name: (point.physical, point.best) for point in pareto.points(rows)}
    assert found == {
        "cheap": (0.1, True), "same": (0.1, True), "worse": (0.1, False), "dear": (0.2, False),
        "good": (0.5, True),
    }  # fmt: skip


def test_the_line_joins_the_rows_that_are_not_beaten() -> None:
    drawn = pareto.picture([row("a", 0.5, 50), row("b", 0.25, 100), row("c", 1.0, 200)])
    assert drawn is not None
    assert drawn.front == "188.0,142.0 608.0,12.0"
    assert [label for _, label in drawn.ticks] == ["0%", "25%", "50%", "75%", "100%"]
    assert pareto.picture([row("alone", 0.5, 50)]) is None


def test_the_front_in_words_is_that_of_the_picture() -> None:
    rows = [row("a", 0.5, 50), row("b", 0.25, 100), row("c", 1.0, 200)]
    said = "No other row keeps as much attention for as few physical pairs: "
    assert front(rows) == said + "a 50.0% for 25.0%; c 100.0% for 100.0%."
    assert front(rows[:1]) == ""


def test_the_picture_in_the_docstring_holds() -> None:
    found = doctest.testmod(pareto)
    assert found.attempted and not found.failed


def test_every_selector_of_the_comparison_has_the_same_logical_budget() -> None:
    """128 keys a query: as tokens, or as blocks."""
    experiment = load(CONFIGS / "compare_selectors.yaml")
    selectors = [case.select for case in experiment.cases if case.select is not None]
    assert len(selectors) >= 7
    assert {s.keep * s.block for s in selectors} == {128}


def test_a_report_without_two_rows_has_no_such_picture(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", "none", [], {"cpu": "x", "torch": "y", "files": {}}, "")
    assert "<svg" not in (tmp_path / "report.html").read_text()
