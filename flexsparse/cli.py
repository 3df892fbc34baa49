"""The verbs of the command line."""

from __future__ import annotations

import os
import sys

import typer

from flexsparse import verbs
from flexsparse.errors import FlexSparseError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Sparse attention: exact, fused and accounted for.",
)


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


def _refused(message: str) -> int:
    typer.echo(message, err=True)
    return 2


verbs.register(app)
