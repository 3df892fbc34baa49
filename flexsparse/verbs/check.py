"""``flexsparse check``: a rule, score or selector against the reference."""

from __future__ import annotations

from typing import Annotated

import typer


def check(
    name: Annotated[str, typer.Argument(metavar="FILE.py:Name")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many tokens, by default 65, or for a selector as many as it needs to leave "
            "something out.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Check a rule, score or selector against the reference.

    On small random inputs, 2 sequences with 4 query and 2 KV heads, of which the picture shows the
    first sequence and head. Its arguments follow as key=value, a tensor as a list,
    window=[1,2,3,4]; a gallery name and an import path work too.
    """
    from flexsparse.experiment.trial import trial
    from flexsparse.verbs import terminal
    from flexsparse.viz.source import source
    from flexsparse.viz.terminal import draw

    found = trial(name, arguments or (), tokens)
    report = found.report
    typer.echo(draw(source(report.plan), terminal.width(), terminal.style()) + "\n")
    typer.echo(str(report))
    if found.warning is not None:
        typer.echo(f"Warning: {found.warning}.", err=True)
    return 0 if report.ok else 1
