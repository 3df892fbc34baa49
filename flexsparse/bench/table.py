"""The tables of a bench: attention's, then the conversion beside others, and its bytes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexsparse.bench.attention_tables import attention_tables
from flexsparse.bench.form import Record, table
from flexsparse.bench.way_tables import way_tables
from flexsparse.experiment.columns import NOTHING, number

OURS = "flexsparse"
# Kinds of time, and what each is called.
_TIMES = {"eager_ms": "eager", "wall_ms": "wall", "graph_ms": "graph"}


def print_tables(records: list[Record], console: Console) -> None:
    """The answer first, where attention was timed; then every row beside each baseline, and what
    went wrong or was refused."""
    for made in (
        *attention_tables(records),
        *way_tables(records),
        _conversion(records),
        _bytes(records),
    ):
        if made.row_count:
            console.print(made)
    for record in records:
        if record["error"]:
            by = "" if record["asked"] == "auto" else f" by {record['asked']}"
            style = "dim" if record["status"] == "refused" else "red"
            console.print(Text(f"{record['name']}{by}: {record['error']}", style=style))


def _conversion(records: list[dict[str, Any]]) -> Table:
    # Without a device the three are one.
    on_cpu = all(record["device"] == "cpu" for record in records)
    shown = {k: v for k, v in _TIMES.items() if k == "eager_ms" or not on_cpu}
    made = table(
        "Conversion: median ms, and how many times ours",
        ["row", "who"],
        [head for name in shown.values() for head in (name, "x")],
        ["what it does, or why not"],
    )
    told: set[str] = set()
    for record in records:
        ours = record["ours"]
        # Others were timed beside the first backend of a row.
        if ours is None or record["name"] in told:
            continue
        told.add(record["name"])
        lines = [(OURS, ours, _way(record))]
        if record.get("look_ahead"):
            lines.append(("look ahead", record["look_ahead"], "the rule's tiles alone"))
        lines += [(b["name"], b["cost"], b["reason"] or b["note"]) for b in record["baselines"]]
        for i, (who, cost, said) in enumerate(lines):
            cells = [record["name"] if i == 0 else "", who]
            for key in shown:
                cells += _beside(cost, ours, key)
            no_graph = None if on_cpu or cost is None else cost["no_graph"]
            cells.append("; ".join(filter(None, [said, no_graph and f"no graph: {no_graph}"])))
            made.add_row(*map(Text, cells), style=None if i == 0 else "dim")
        made.add_section()
    return made


def _way(record: dict[str, Any]) -> str:
    if record["kind"] in ("rule", "ragged"):
        return "the rule's layout, from nothing"
    return "from raw indices: sets, tiles, lists"


def _beside(cost: dict[str, Any] | None, ours: dict[str, Any] | None, key: str) -> list[str]:
    """A time and its ratio to ours; no ratio for ours itself."""
    if cost is None or cost[key] is None:
        return [NOTHING, NOTHING]
    if ours is None or ours is cost or not ours[key]:
        return [number(cost[key]), ""]
    return [number(cost[key]), f"{number(cost[key] / ours[key])}x"]


def _bytes(records: list[dict[str, Any]]) -> Table:
    made = table(
        "Bytes: what the layout keeps, and how near its making comes to a copy",
        ["row"],
        ["tile", "kept", "must move", "of copy bandwidth", "peak beside"],
    )
    for record in records:
        if record["ours"] is None:
            continue
        peak = record["ours"]["peak_bytes"]
        made.add_row(
            Text(record["name"]),
            "x".join(map(str, record["tile"])),
            f"{record['kept_bytes']:,}",
            f"{record['fewest_bytes']:,}",
            f"{record['copy_share']:.2%}",
            NOTHING if peak is None else f"{peak:,}",
        )
    return made
