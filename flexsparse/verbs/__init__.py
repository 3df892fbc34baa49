"""Verbs of the command line that look at things, one a file; what they need loads when they run."""

from __future__ import annotations

import typer

from flexsparse.verbs.check import check
from flexsparse.verbs.compare import compare
from flexsparse.verbs.show import show


def register(app: typer.Typer) -> None:
    """Adds the verbs of this folder."""
    for verb in (show, check, compare):
        app.command()(verb)
