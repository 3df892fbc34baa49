"""The verbs of the command line."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexsparse.errors import FlexSparseError

if TYPE_CHECKING:
    from flexsparse.backends import Backend

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Sparse attention: exact, fused and accounted for.",
)

Arguments = Annotated[list[str] | None, typer.Argument(metavar="key=value", show_default=False)]


def main() -> None:
    """Entry point. What the user can mend is one sentence on stderr and exit code 2."""
    # As `python -m` does, so that my_lab.rules:Name is found; last, so that it shadows nothing.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        code = app(standalone_mode=False)
    except FlexSparseError as error:
        code = _refused(str(error))
    except typer.Abort:
        code = 130
    except Exception as error:
        # The parser's own errors; anything else is a bug, and keeps its traceback.
        if not hasattr(error, "format_message"):
            raise
        code = _refused(error.format_message())
    sys.exit(code)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Arguments = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration as it would run.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write, by default results/NAME.")
    ] = None,
) -> int:
    """Run an experiment from a YAML file.

    Prints its table; rows.jsonl and report.html go to the results folder. Values of the file are overridden by path, such as rows.1.tile=64 or dtype=bfloat16.
    """
    from flexsparse.experiment.config import load

    experiment = load(config, overrides or ())
    if print_config:
        typer.echo(experiment.config.as_yaml(), nl=False)
        return 0
    from rich.console import Console

    from flexsparse.experiment import run as running
    from flexsparse.experiment.table import print_table

    folder = out or Path("results") / experiment.config.name
    done = count(1)

    def told(record: dict[str, Any]) -> None:
        of = f"{next(done)}/{len(experiment.cases)}"
        typer.echo(f"{of} {record['name']}: {record['status']}", err=True)

    records = running.run(experiment, folder, told)
    # Where nobody says how wide the page is, as in a log, the tables decide.
    print_table(records, Console() if sys.stdout.isatty() else Console(width=100))
    typer.echo(f"{folder / 'report.html'}")
    return 0 if all(record["status"] == "ok" for record in records) else 1


@app.command()
def bench(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Arguments = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write, by default results/NAME.")
    ] = None,
) -> int:
    """Time the conversion of a YAML file's problems beside what others do.

    Prints its tables; config.yaml, environment.json and rows.jsonl go to the results folder. Values of the file are overridden by path, such as rows.0.blocks.length=4096.
    """
    from flexsparse.bench.config import load

    made = load(config, overrides or ())
    from rich.console import Console

    from flexsparse.bench import run as running
    from flexsparse.bench.table import print_tables

    folder = out or Path("results") / made.config.name
    done = count(1)

    def told(record: dict[str, Any]) -> None:
        of = f"{next(done)}/{len(made.config.rows)}"
        typer.echo(f"{of} {record['name']}: {record['status']}", err=True)

    records = running.run(made, folder, told)
    print_tables(records, Console() if sys.stdout.isatty() else Console(width=140))
    typer.echo(f"{folder / 'rows.jsonl'}")
    return 0 if all(record["status"] == "ok" for record in records) else 1


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="FILE.py:Name")],
    arguments: Arguments = None,
) -> int:
    """Check a rule, score or selector against the reference.

    On small random inputs. Its arguments follow as key=value; a gallery name and an import path
    work too.
    """
    from flexsparse.experiment.trial import trial

    report, picture = trial(name, arguments or ())
    if picture:
        typer.echo(picture + "\n")
    typer.echo(str(report))
    return 0 if report.ok else 1


@app.command("list")
def list_() -> int:
    """List what a configuration can name, and which backends run here."""
    from flexsparse.resolve import Kind, gallery

    kinds: list[tuple[Kind, str]] = [
        ("rule", "Rules"), ("score", "Scores"), ("selector", "Selectors")
    ]  # fmt: skip
    for kind, title in kinds:
        typer.echo(title)
        for name, found in gallery(kind).items():
            module = sys.modules[found.__module__].__doc__ or ""
            typer.echo(f"  {name:16} {module.strip().splitlines()[0]}")
    typer.echo("Backends")
    for backend in _backends():
        typer.echo(f"  {backend.name:16} {_runs(backend)}")
    return 0


def _backends() -> list[Backend]:
    from importlib import import_module
    from typing import get_args

    from flexsparse.choice import BackendName

    names = [name for name in get_args(BackendName) if name != "auto"]
    backends: list[Any] = [import_module(f"flexsparse.backends.{name}") for name in names]
    return backends


def _runs(backend: Backend) -> str:
    """What a backend does on this machine's device, and why not the rest."""
    import torch

    from flexsparse.backends import Call

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = {"forward": (False, False), "lse": (False, True), "gradients": (True, True)}
    can: list[str] = []
    cannot: dict[str, list[str]] = {}
    for what, (grads, lse) in asked.items():
        why = backend.refuses(Call(device, torch.float32, 64, 64, grads, lse))
        if why is None:
            can.append(what)
        else:
            cannot.setdefault(why, []).append(what)
    said = [f"{', '.join(can) or 'nothing'} on {device.type}"]
    return "; ".join([*said, *(f"no {', '.join(what)}: {why}" for why, what in cannot.items())])


def _refused(message: str) -> int:
    typer.echo(message, err=True)
    return 2
