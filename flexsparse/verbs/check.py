"""``flexsparse check``: a rule, score or selector against the reference."""

from __future__ import annotations

from typing import Annotated

import typer


def check(
    name: Annotated[str, typer.Argument(metavar="FILE.py:Name")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", show_default=False)
    ] = None,
) -> int:
    """Check a rule, score or selector against the reference.

    On small random inputs, 2 sequences of 65 tokens with 4 query and 2 KV heads, of which the
    picture shows the first sequence and head. Its arguments follow as key=value, a tensor as a
    list, window=[1,2,3,4]; a gallery name and an import path work too.
    """
    from flexsparse.experiment.trial import trial
    from flexsparse.verbs import terminal
    from flexsparse.viz.source import source
    from flexsparse.viz.terminal import draw

    report = trial(name, arguments or ())
    typer.echo(draw(source(report.plan), terminal.width(), terminal.style()) + "\n")
    typer.echo(str(report))
    return 0 if report.ok else 1
