"""Verbs of the command line, one a file; what they need loads when they run."""

from __future__ import annotations

import typer

from flexsparse.verbs.bench import BENCH, bench
from flexsparse.verbs.check import check
from flexsparse.verbs.compare import compare
from flexsparse.verbs.listing import list_
from flexsparse.verbs.run import HELP, run, schema
from flexsparse.verbs.show import show


def register(app: typer.Typer) -> None:
    """Adds the verbs of this folder."""
    app.command("run", help=HELP)(run)
    app.command("bench", help=BENCH)(bench)
    for verb in (check, show, compare, schema):
        app.command()(verb)
    app.command("list")(list_)
