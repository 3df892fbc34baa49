"""``flexsparse bench``: what conversion costs, beside what others do."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write, by default results/NAME.")
    ] = None,
) -> int:
    """Time the conversion of a YAML file's problems beside what others do.

    Prints its tables; config.yaml, environment.json and rows.jsonl go to the results folder. Values
    of the file are overridden by path, such as rows.0.blocks.length=4096.
    """
    from rich.console import Console

    from flexsparse.bench import run as running
    from flexsparse.bench.config import load
    from flexsparse.bench.table import print_tables

    made = load(config, overrides or ())
    folder = out or Path("results") / made.config.name
    done = count(1)

    def told(record: dict[str, Any]) -> None:
        of = f"{next(done)}/{len(made.config.rows)}"
        typer.echo(f"{of} {record['name']}: {record['status']}", err=True)

    records = running.run(made, folder, told)
    # Where nobody says how wide the page is, as in a log, the tables decide.
    print_tables(records, Console() if sys.stdout.isatty() else Console(width=140))
    typer.echo(f"{folder / 'rows.jsonl'}")
    return 0 if all(record["status"] == "ok" for record in records) else 1
