"""``flexsparse bench``: what conversion costs, beside what others do."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from flexsparse.bench.example import EXAMPLE
from flexsparse.verbs.rows import Rows

BENCH = f"""Time the conversion of a YAML file's problems beside what others do.

Prints its tables; config.yaml, environment.json and rows.jsonl go to the results folder. Values of the
file are overridden by path, such as rows.0.blocks.length=4096; rows.0=null leaves a row out.

The form of the file:

\b
{EXAMPLE}"""


def bench(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", show_default=False)
    ] = None,
    rows: Rows = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write, by default results/NAME.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Processes that compile for rows with ways before any is timed.",
        ),
    ] = 0,
) -> int:
    """See `BENCH`."""
    from rich.console import Console

    from flexsparse.bench import run as running
    from flexsparse.bench.config import load
    from flexsparse.bench.table import print_tables

    made = load(config, overrides or (), rows or ())
    folder = out or Path("results") / made.config.name
    done, usual = count(1), made.config.backend
    count_of = sum(len(row.backends(usual)) for row in made.config.rows)

    def told(record: dict[str, Any]) -> None:
        by = "" if record["asked"] == "auto" else f" by {record['asked']}"
        typer.echo(f"{next(done)}/{count_of} {record['name']}{by}: {record['status']}", err=True)

    records = running.run(made, folder, told, workers)
    # Where nobody says how wide the page is, as in a log, the tables decide.
    print_tables(records, Console() if sys.stdout.isatty() else Console(width=160))
    typer.echo(f"{folder / 'rows.jsonl'}")
    return 0 if all(record["status"] in ("ok", "refused") for record in records) else 1
