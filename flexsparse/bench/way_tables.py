"""Whether plans chose well: each choice beside the best of all ways, and predictions beside the clock."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from flexsparse.bench.form import Record, add, table
from flexsparse.experiment.columns import NOTHING, number

# A prediction this near, or a choice this near to the best, is a good one.
NEAR, BEST = 0.25, 0.10


def way_tables(records: list[Record]) -> list[Table]:
    """Those that have lines."""
    found = [record for record in records if record.get("ways")]
    return [made for made in (_searched(found), _predicted(found)) if made.row_count]


def near(records: list[Record]) -> tuple[int, int]:
    """How many choices took what was predicted within `NEAR`, of how many that were predicted."""
    off = [_off(record["ways"]["chosen"]) for record in records if record.get("ways")]
    known = [ratio for ratio in off if ratio is not None]
    return sum(abs(ratio - 1) <= NEAR for ratio in known), len(known)


def _searched(records: list[Record]) -> Table:
    searched = [r for r in records if r["ways"]["every"]]
    within = sum(r["ways"]["over_best"] <= 1 + BEST for r in searched)
    made = table(
        f"All ways tried: {within} of {len(searched)} choices within {BEST:.0%} of the best",
        ["row", "mode"],
        ["ways", "chosen ms", "best ms", "x"],
        ["chosen", "best", "next"],
    )
    for record in searched:
        found = record["ways"]
        order = sorted(found["ways"], key=lambda way: way["ms"])
        after = ", ".join(f"{_said(way)} {number(way['ms'])}" for way in order[1:4])
        add(
            made, record["name"], found["mode"], str(len(order)), number(found["chosen"]["ms"]),
            number(found["best"]["ms"]), f"{found['over_best']:.3f}", _said(found["chosen"]),
            _said(found["best"]), after,
        )  # fmt: skip
    return made


def _predicted(records: list[Record]) -> Table:
    good, known = near(records)
    said = f"{good} of {known} choices within {NEAR:.0%}"
    if not known:
        said = "no choice was predicted, as none is on a CPU or where one way alone can run"
    made = table(
        f"Predicted over measured: {said}",
        ["row"],
        ["ms", "predicted", "ratio"],
        ["chosen"],
    )
    for record in records:
        own = record["ways"]["chosen"]
        ratio, predicted = _off(own), own["predicted_ms"]
        cells = [number(own["ms"]), NOTHING if predicted is None else number(predicted)]
        said = NOTHING if ratio is None else f"{ratio:.2f}{'' if abs(ratio - 1) <= NEAR else ' !'}"
        add(made, record["name"], *cells, said, _said(own))
    return made


def _off(way: dict[str, Any]) -> float | None:
    return None if way["predicted_ms"] is None else float(way["predicted_ms"] / way["ms"])


def _said(way: dict[str, Any]) -> str:
    where = "" if way["backend"] in ("gather", "dense") else " {}x{}".format(*way["tile"])
    return f"{way['backend']}{where}{' packed' if way['pack'] == 'pack' else ''}"
