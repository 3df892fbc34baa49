"""The table of a run: what each row keeps, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexsparse.experiment.verdict import baseline, verdict

QUESTION = "Did the hardware skip what the algorithm promised?"
NOTHING = "–"  # noqa: RUF001


class Column(NamedTuple):
    """A heading, what it means, and a row's entry."""

    head: str
    means: str
    of: Callable[[dict[str, Any]], str]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def _ms(stage: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _number(row["time_ms"][stage])


def _check(row: dict[str, Any]) -> str:
    if "check" not in row:
        return "not checked"
    parts = row["check"]["quantities"].values()
    if any(p["error"] is None or p["budget"] is None for p in parts):
        return f"{row['status']}, not finite"
    used = max((p["error"] / p["budget"] for p in parts if p["error"]), default=0.0)
    return f"{row['status']}, {used:.0%} of budget"


KEEPS = (
    Column(
        "check",
        "largest error against the fp64 reference, in parts of the budget that the data allow",
        _check,
    ),
    Column(
        "mass kept",
        "dense softmax mass on the row's pairs, mean over batch, heads and queries",
        lambda row: _share(row["mass_kept"]),
    ),
    Column(
        "output error",
        "relative distance to the dense output, Frobenius norm",
        lambda row: _number(row["output_error"]),
    ),
    Column(
        "pairs",
        "logical pairs, in parts of dense attention's",
        lambda row: _share(row["budget"]["of_dense"]),
    ),
    Column(
        "inflation",
        "physical pairs for each logical pair",
        lambda row: _number(row["budget"]["inflation"]),
    ),
)

COSTS = (
    Column("index", "the selector", _ms("index")),
    Column("layout", "rule and selection to tiles", _ms("layout")),
    Column("movement", "tensors copied for the kernel", _ms("movement")),
    Column("kernel", "attention itself", _ms("kernel")),
    Column("total", "all stages; medians, so not quite their sum", _ms("total")),
    Column(
        "first call",
        "before anything was warm, compiling and deciding included",
        lambda row: _number(row["first_ms"]),
    ),
)

DELIVERED = (
    Column(
        "promised",
        "how many times fewer pairs than dense attention",
        lambda row: _times(row["promised"]),
    ),
    Column(
        "got", "how many times less time than dense attention took", lambda row: _times(row["got"])
    ),
    Column(
        "delivered",
        "got / promised: 1 where every skipped pair was skipped time",
        lambda row: _number(row["delivered"]),
    ),
    Column(
        "= selector", "logical / physical pairs", lambda row: _number(row["factors"]["selector"])
    ),
    Column("x worktable", "kernel / total time", lambda row: _number(row["factors"]["worktable"])),
    Column(
        "x kernel",
        "physical pairs a second, in parts of dense attention's",
        lambda row: _number(row["factors"]["kernel"]),
    ),
)

TABLES = (
    ("What each row keeps", KEEPS),
    ("Where the time goes, in ms", COSTS),
    ("What was delivered", DELIVERED),
)


def cells(row: dict[str, Any], columns: tuple[Column, ...]) -> list[str]:
    """A row's entries; dashes where it failed."""
    if row["status"] == "failed":
        first = "failed" if columns is KEEPS else NOTHING
        return [first] + [NOTHING] * (len(columns) - 1)
    return [column.of(row) for column in columns]


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """The answer first, then the tables, then what went wrong."""
    console.print(Text(QUESTION, style="bold"))
    console.print(Text(verdict(rows)))
    console.print(Text(baseline(rows), style="dim"))
    for title, columns in TABLES:
        console.print()
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("row", overflow="fold")
        for column in columns:
            table.add_column(column.head, justify="right", no_wrap=True)
        for row in rows:
            style = None if row["status"] == "ok" else "red"
            table.add_row(Text(row["name"]), *map(Text, cells(row, columns)), style=style)
        console.print(table)
    for row in rows:
        if row["error"]:
            console.print(Text(f"{row['name']}: {row['error']}", style="red"))
