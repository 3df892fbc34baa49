"""The tables of a bench: what attention delivered, the conversion beside others, and its bytes."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexsparse.experiment.table import NOTHING, number

OURS = "flexsparse"
# Kinds of time, and what each is called.
_TIMES = {"eager_ms": "eager", "wall_ms": "wall", "graph_ms": "graph"}


def print_tables(records: list[dict[str, Any]], console: Console) -> None:
    """The answer first, where attention was timed; then every row beside each baseline, and what
    went wrong."""
    for table in (_delivered(records), _conversion(records), _bytes(records)):
        if table.row_count:
            console.print(table)
    for record in records:
        if record["error"]:
            console.print(Text(f"{record['name']}: {record['error']}", style="red"))


def _conversion(records: list[dict[str, Any]]) -> Table:
    # Without a device the three are one.
    on_cpu = all(record["device"] == "cpu" for record in records)
    shown = {k: v for k, v in _TIMES.items() if k == "eager_ms" or not on_cpu}
    table = _table("Conversion: median ms, and how many times ours")
    table.add_column("row", overflow="fold")
    table.add_column("who", overflow="fold")
    for head in shown.values():
        table.add_column(head, justify="right", no_wrap=True)
        table.add_column("x", justify="right", no_wrap=True)
    table.add_column("what it does, or why not", overflow="fold")
    for record in records:
        ours = record["ours"]
        lines = [(OURS, ours, record["error"] if ours is None else _way(record))]
        if record.get("look_ahead"):
            lines.append(("look ahead", record["look_ahead"], "the rule's tiles alone"))
        lines += [(b["name"], b["cost"], b["reason"] or b["note"]) for b in record["baselines"]]
        for i, (who, cost, said) in enumerate(lines):
            cells = [record["name"] if i == 0 else "", who]
            for key in shown:
                cells += _beside(cost, ours, key)
            no_graph = None if on_cpu or cost is None else cost["no_graph"]
            cells.append("; ".join(filter(None, [said, no_graph and f"no graph: {no_graph}"])))
            table.add_row(*map(Text, cells), style=None if i == 0 else "dim")
        table.add_section()
    return table


def _way(record: dict[str, Any]) -> str:
    if record["kind"] == "rule":
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
    table = _table("Bytes: what the layout keeps, and how near its making comes to a copy")
    table.add_column("row", overflow="fold")
    for head in ("tile", "kept", "must move", "of copy bandwidth", "peak beside"):
        table.add_column(head, justify="right", no_wrap=True)
    for record in records:
        if record["ours"] is None:
            continue
        peak = record["ours"]["peak_bytes"]
        table.add_row(
            Text(record["name"]),
            "x".join(map(str, record["tile"])),
            f"{record['kept_bytes']:,}",
            f"{record['fewest_bytes']:,}",
            f"{record['copy_share']:.2%}",
            NOTHING if peak is None else f"{peak:,}",
        )
    return table


def _delivered(records: list[dict[str, Any]]) -> Table:
    table = _table("Delivered = (dense / total) / promised, layout inside")
    table.add_column("row", overflow="fold", min_width=16)
    heads = (
        "dense ms", "kernel ms", "total ms", "promised", "got", "delivered",
        "= selector x worktable x kernel", "error (plain)",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for record in records:
        attention = record["attention"] or {}
        for mode in ("forward", "training"):
            if mode not in attention:
                continue
            found, errors = attention[mode], attention["check"]
            times, dense = found["time_ms"], found["dense"]
            factors = (number(found["factors"][n]) for n in ("selector", "worktable", "kernel"))
            cells = [
                record["name"] if mode == "forward" else "  and backward",
                f"{number(dense['ms'])} {dense['by']}",
                number(times["kernel"]),
                number(times["total"]),
                f"{number(found['promised'])}x",
                f"{number(found['got'])}x",
                number(found["delivered"]),
                " x ".join(factors),
                f"{number(errors['error'])} ({number(errors['plain_error'])})",
            ]
            table.add_row(*map(Text, cells))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
