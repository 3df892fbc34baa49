"""The option that picks rows of a configuration, of every verb that runs them."""

from __future__ import annotations

from typing import Annotated

import typer

Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--rows",
        metavar="WHICH",
        show_default=False,
        help="Run these rows alone: a name, a pattern such as 'NSA*', a number from 0, or several "
        "with commas between; may be given again.",
    ),
]
