"""The form of a bench's tables: words to the left, figures to the right, remarks last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]


def table(
    title: str, words: Sequence[str], figures: Sequence[str], remarks: Sequence[str] = ()
) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, head in enumerate(words):
        made.add_column(head, overflow="fold", min_width=6 if i else 16)
    for head in figures:
        made.add_column(head, justify="right", no_wrap=True)
    for head in remarks:
        made.add_column(head, overflow="fold")
    return made


def add(made: Table, *cells: str | Text) -> None:
    """A line; what a user wrote is no markup."""
    made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
