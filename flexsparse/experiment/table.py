"""The table of a run: what each row keeps, and what it costs."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexsparse.experiment.columns import CHECKS, NOTHING, TABLES, Column, always
from flexsparse.experiment.verdict import baseline, baselines, front, noted, verdict

QUESTION = "Did the hardware skip what the algorithm promised?"


def tables(rows: list[dict[str, Any]]) -> list[tuple[str, tuple[Column, ...]]]:
    """The titles and columns that say something of these rows."""
    finished = [row for row in rows if row["status"] != "failed"]
    found = [
        (title, tuple(c for c in columns if c.told is always or any(map(c.told, finished))))
        for title, columns in TABLES
    ]
    return [(title, columns) for title, columns in found if columns]


def cells(row: dict[str, Any], columns: tuple[Column, ...]) -> list[str]:
    """A row's entries; dashes where it failed."""
    if row["status"] == "failed":
        first = "failed" if columns[0] is CHECKS[0] else NOTHING
        return [first] + [NOTHING] * (len(columns) - 1)
    return [column.of(row) for column in columns]


def lines(
    rows: list[dict[str, Any]], columns: tuple[Column, ...]
) -> list[tuple[str, str, list[str]]]:
    """(name, status, entries), the baseline first; a star marks a row with a note."""
    found = []
    if columns[0] is not CHECKS[0]:
        several = len(baselines(rows)) > 1
        for dense in baselines(rows):
            name = f"baseline: {dense['rule']}"
            offset = dense["q_offset"]
            where = "no q_offset" if offset is None else f"q_offset {offset}"
            name += f", {where}" if several else ""
            found.append((name, "baseline", [column.base(dense) for column in columns]))
    for row in rows:
        star = "\u00a0*" if row.get("notes") else ""
        found.append((row["name"] + star, row["status"], cells(row, columns)))
    return found


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """The answer first, then the tables, then what to know beside them, then what went wrong."""
    console.print(Text(QUESTION, style="bold"))
    console.print(Text(verdict(rows)))
    if said := front(rows):
        console.print(Text(said))
    console.print(Text(baseline(rows), style="dim"))
    styles = {"ok": "", "baseline": "dim"}
    for title, columns in tables(rows):
        console.print()
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("row", overflow="fold")
        for column in columns:
            table.add_column(column.head, justify="right", no_wrap=True)
        for name, status, entries in lines(rows, columns):
            table.add_row(Text(name), *map(Text, entries), style=styles.get(status, "red"))
        console.print(table)
    for name, note in noted(rows):
        console.print(Text(f"* {name}: {note}."))
    for row in rows:
        if row["error"]:
            console.print(Text(f"{row['name']}: {row['error']}", style="red"))
