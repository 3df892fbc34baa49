"""The door to matplotlib, which is imported by those who ask for a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexsparse.errors import BackendError
from flexsparse.selection import Selection
from flexsparse.viz.source import Showable, Source, source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(
    shown: Showable,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    select: Selection | None = None,
    tile: int | tuple[int, int] | None = None,
    b: int = 0,
    h: int = 0,
    q_offset: int | Tensor | None = None,
    dark: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """A rule, a Selection, both (``select=``), a Layout or a Plan as a matplotlib figure.

    Blue pairs are seen in full tiles, orange ones in partial tiles; pale ones are computed and not
    seen; paper is skipped; candidates are outlined while there is room. Past 512 tokens a pixel is
    the mean of a block of pairs, past 2 ** 26 pairs a sample of them, and the title says "about";
    memory never grows with their number. ``tile`` is by default 16 up to 512 tokens, else 128.
    A figure of its own is returned, or that of ``ax``; ``figure.savefig("rule.svg")`` keeps it.
    """
    figure = _figure()
    made = source(shown, q_len, kv_len, select=select, tile=tile, b=b, h=h, q_offset=q_offset)
    drawn: Figure = figure.draw(made, dark, ax)
    return drawn


def plot_all(sources: list[Source], names: list[str], dark: bool) -> Figure:
    """Several side by side, each under its name."""
    drawn: Figure = _figure().draw_all(sources, names, dark)
    return drawn


def _figure() -> Any:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendError(
            "plots need matplotlib, which is not installed: pip install 'flexsparse[plot]'; "
            "flexsparse.picture draws in text without it"
        ) from error
    from flexsparse.viz import figure

    return figure
