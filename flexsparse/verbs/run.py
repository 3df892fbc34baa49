"""``flexsparse run`` and ``flexsparse schema``: experiments from YAML files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexsparse.experiment.form import FORM
from flexsparse.verbs.rows import Rows

if TYPE_CHECKING:
    from flexsparse.experiment.run import Progress

HELP = f"""Run an experiment from a YAML file.

Prints its tables; config.yaml, environment.json, rows.jsonl and report.html go to the results
folder. Exit code 0: every row is right; 1: a row failed or is wrong; 2: nothing ran.

Values are overridden by path, with a row's name or number: rows.window.rule.sliding_window.size=32,
rows.1.tile=64, dtype=bfloat16, baseline=null; rows.window=null leaves that row out. For a quick look:
--rows 'window*,quest' 'input.sample={{name: smollm2, tokens: 256}}'. `flexsparse list` says which
rules, scores and selectors there are and what each takes; `flexsparse schema` is for editors.

The form of the file:

\b
{FORM}"""


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", show_default=False)
    ] = None,
    rows: Rows = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration as it would run.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep the rows that an earlier run has finished, and go on after them."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write, by default results/NAME.")
    ] = None,
) -> int:
    """See `HELP`."""
    from flexsparse.experiment.load import load

    experiment = load(config, overrides or (), rows or ())
    if print_config:
        typer.echo(experiment.as_yaml(), nl=False)
        return 0
    from rich.console import Console

    from flexsparse.experiment import run as running
    from flexsparse.experiment.table import print_table

    folder = out or Path("results") / experiment.config.name
    try:
        records = running.run(experiment, folder, _told, resume=resume)
    except KeyboardInterrupt:
        typer.echo(f"stopped; finished rows are in {folder}: --resume goes on", err=True)
        return 130
    # Where nobody says how wide the page is, as in a log, the tables decide.
    print_table(records, Console() if sys.stdout.isatty() else Console(width=100))
    typer.echo(f"{folder / 'report.html'}")
    return 0 if all(record["status"] == "ok" for record in records) else 1


def schema() -> int:
    """Print the JSON schema of a configuration, for editors.

    Write it to a file, and name that file in the first line of the YAML:

    \b
    flexsparse schema > flexsparse.schema.json
    # yaml-language-server: $schema=flexsparse.schema.json
    """
    from flexsparse.experiment.schema import schema as made

    typer.echo(json.dumps(made(), indent=2))
    return 0


def _told(record: dict[str, Any], progress: Progress) -> None:
    left = f"; about {_duration(progress.left)} left" if progress.done < progress.of else ""
    typer.echo(
        f"{progress.done}/{progress.of} {record['name']}: {record['status']}, "
        f"{_duration(record['seconds'])}{left}",
        err=True,
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
