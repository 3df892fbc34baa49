"""The gallery as one HTML file that needs nothing else."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from flexsparse.gallery.entries import entries

KINDS = (("rule", "Rules", "what may be seen"), ("score", "Scores", "how a score changes"))


def write_page(path: Path) -> None:
    """Every rule and score with its source, parameters and pictures."""
    template = files("flexsparse.gallery").joinpath("page.html").read_text(encoding="utf-8")
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page.filters["marked"] = _marked
    found = entries()
    groups = [
        (title, what, [entry for entry in found if entry.rules[0].kind == kind])
        for kind, title, what in KINDS
    ]
    path.write_text(page.from_string(template).render(groups=groups), encoding="utf-8")


def _marked(text: str) -> str:
    """A docstring's code and addresses, as they are marked there."""
    safe = escape(text)
    safe = re.sub(r"``?([^`]+)``?", r"<code>\1</code>", safe)
    safe = re.sub(r"(https://[^\s;,]*[^\s;,.:])", r'<a href="\1">\1</a>', safe)
    return safe
