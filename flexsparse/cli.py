"""The verbs of the command line."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flexsparse.errors import FlexSparseError
from flexsparse.verbs.listing import list_
from flexsparse.verbs.run import HELP, run, schema

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


app.command("run", help=HELP)(run)


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


app.command("list")(list_)
app.command("schema")(schema)


def _refused(message: str) -> int:
    typer.echo(message, err=True)
    return 2
