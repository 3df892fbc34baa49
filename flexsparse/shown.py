"""The hook by which a notebook shows an object; what it then shows is written in `flexsparse.viz`."""

from __future__ import annotations


class Shown:
    """An object that a notebook shows as HTML, and everything else as its ``repr``."""

    def _repr_html_(self) -> str:
        from flexsparse.viz.notebook import html

        return html(self)
