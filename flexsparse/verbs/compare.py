"""``flexsparse compare``: two finished runs, row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flexsparse.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Run:
    """What a run left: its rows by name, and every value of its configuration and environment."""

    name: str
    rows: dict[str, dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]


def compare(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
) -> int:
    """Compare two finished runs, given as their folders or rows.jsonl.

    Rows are joined by name. First comes what differs in configuration and environment: times of
    different boxes do not compare.
    """
    from rich.console import Console

    from flexsparse.verbs import terminal

    print_comparison(read_run(a), read_run(b), Console(width=terminal.width()))
    return 0


def read_run(where: str) -> Run:
    """The run in a folder, or beside a ``rows.jsonl``."""
    path = Path(where)
    folder, file = (path, path / "rows.jsonl") if path.is_dir() else (path.parent, path)
    if not file.is_file():
        raise ConfigError(
            f"there is no finished run at {where}: compare takes a results folder, which holds "
            "rows.jsonl, or that file"
        )
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(_text(file).splitlines(), 1):
        try:
            record = json.loads(line)
            rows[record["name"]] = record
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{file}:{number}: is not a row of a run, a JSON object with a name"
            ) from None
    if not rows:
        raise ConfigError(f"{file} has no finished row")
    return Run(where, rows, _config(folder), _environment(folder))


def _config(folder: Path) -> dict[str, Any]:
    """Every value of config.yaml by path; rows by their name, wherever they stand."""
    from flexsparse.experiment.source import read

    file = folder / "config.yaml"
    data = read(file).data if file.is_file() else {}
    if isinstance(data, dict) and isinstance(data.get("rows"), list):
        rows = {str(r.get("name")): r for r in data["rows"] if isinstance(r, dict)}
        data = data | {"rows": rows}
    return dict(_leaves(data))


def _environment(folder: Path) -> dict[str, Any]:
    file = folder / "environment.json"
    try:
        return dict(_leaves(json.loads(_text(file)))) if file.is_file() else {}
    except ValueError:
        raise ConfigError(f"{file} is not JSON") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None


def _leaves(data: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(data, dict) or (at and not data):
        yield at, data
        return
    for key, value in data.items():
        yield from _leaves(value, f"{at}.{key}" if at else str(key))


class Column(NamedTuple):
    """A heading, and what a row of either run has there; ``ratio`` where B is put over A, or else how
    a number is written."""

    head: str
    of: Callable[[dict[str, Any]], float | None]
    ratio: bool
    form: str = ".3g"


def _at(*path: str) -> Callable[[dict[str, Any]], float | None]:
    def found(row: dict[str, Any]) -> float | None:
        value: Any = row
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) else None

    return found


def used(row: dict[str, Any]) -> float | None:
    """The largest error against the reference in parts of its budget; None where not checked."""
    parts = [(_at("error")(p), _at("budget")(p)) for p in _quantities(row)]
    known = [
        error / budget if budget else 0.0
        for error, budget in parts
        if error is not None and budget is not None
    ]
    return max(known, default=None) if len(known) == len(parts) else None


def _quantities(row: dict[str, Any]) -> list[Any]:
    check = row.get("check")
    return list(check.get("quantities", {}).values()) if isinstance(check, dict) else []


KEEPS = (
    Column("mass kept", _at("mass_kept"), False),
    Column("output error", _at("output_error"), False),
    Column("of budget", used, False),
    Column("inflation", _at("budget", "inflation"), False),
    Column("pairs", _at("budget", "logical_pairs"), True),
)
# Only of runs that ask for it; a hundredth of it is much.
PERPLEXITY = Column("perplexity", _at("perplexity", "value"), False, ",.2f")
COSTS = (
    Column("kernel", _at("time_ms", "kernel"), True),
    Column("total", _at("time_ms", "total"), True),
    Column("dense", _at("dense", "ms"), True),
    Column("delivered", _at("delivered"), False),
)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Paths whose values differ, with both."""
    keys = [*a, *(key for key in b if key not in a)]
    return [
        (key, _said(a, key), _said(b, key))
        for key in keys
        if key not in a or key not in b or a[key] != b[key]
    ]


def _row_of(path: str, names: list[str]) -> str | None:
    """Which of these rows, longest names first, a path of the configuration belongs to."""
    return next((name for name in names if path.startswith(f"rows.{name}.")), None)


def _said(values: dict[str, Any], key: str) -> str:
    if key not in values:
        return "absent"
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cell(column: Column, a: dict[str, Any], b: dict[str, Any]) -> str:
    """``A -> B``, one of them where they agree, or B / A."""
    one, other = column.of(a), column.of(b)
    if column.ratio:
        return NOTHING if one is None or other is None or not one else f"{other / one:.3g}x"
    first, second = (NOTHING if x is None else f"{x:{column.form}}" for x in (one, other))
    return first if first == second else f"{first} → {second}"


def print_comparison(a: Run, b: Run, console: Console) -> None:
    """What differs around the runs, then the rows that both have, then those that one has."""
    from rich.text import Text

    console.print(Text(f"A is {a.name}\nB is {b.name}"))
    shared = [name for name in a.rows if name in b.rows]
    every = sorted({**a.rows, **b.rows}, key=len, reverse=True)
    for what, mine, theirs in (
        ("configuration", a.config, b.config),
        ("environment", a.environment, b.environment),
    ):
        unknown = [run for run, has in (("A", mine), ("B", theirs)) if not has]
        if unknown:
            console.print(Text(f"\nThe {what} of {' and '.join(unknown)} is not known."))
            continue
        # Rows that one run alone has are named below.
        found = [d for d in differences(mine, theirs) if _row_of(d[0], every) in (None, *shared)]
        console.print(Text(f"\n{'Different' if found else 'Same'} {what}"), style="bold")
        for key, *values in found:
            console.print(Text(f"  {key}: {values[0]} → {values[1]}"))
    pairs = [(name, a.rows[name], b.rows[name]) for name in shared]
    if pairs:
        asked = any(PERPLEXITY.of(row) is not None for _, *both in pairs for row in both)
        keeps = (PERPLEXITY, *KEEPS) if asked else KEEPS
        _print_rows("What each row keeps, A → B; of pairs B / A", keeps, pairs, console)
        _print_rows("What it costs; of times B / A", COSTS, pairs, console)
    else:
        console.print(Text("\nNo row is in both."))
    for name, *records in pairs:
        states = [str(r.get("status")) for r in records]
        if states != ["ok", "ok"]:
            console.print(Text(f"{name}: {' → '.join(states)}"), style="red")
    for which, run, rest in (("A", a, b), ("B", b, a)):
        if names := [name for name in run.rows if name not in rest.rows]:
            console.print(Text(f"Only in {which}: {', '.join(names)}"))


def _print_rows(
    title: str,
    columns: tuple[Column, ...],
    pairs: list[tuple[str, dict[str, Any], dict[str, Any]]],
    console: Console,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("row", overflow="fold")
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for name, a, b in pairs:
        table.add_row(Text(name), *(Text(cell(column, a, b)) for column in columns))
    console.print()
    console.print(table)
