"""A raster in matplotlib."""

from __future__ import annotations

import io
import textwrap

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from flexsparse.viz import words
from flexsparse.viz.axis import Axis
from flexsparse.viz.palette import DARK, LIGHT, Palette, colours
from flexsparse.viz.raster import Raster
from flexsparse.viz.source import Source

CELLS = 512
# As many tiles a side, and candidates in all, can be outlined and still be told apart.
_TILES = 64
_CANDIDATES = 4096


class Picture(Figure):
    """A figure that a notebook shows by itself, without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=110)
        return file.getvalue()


def draw(source: Source, dark: bool, ax: Axes | None) -> Figure:
    palette = DARK if dark else LIGHT
    if ax is None:
        figure: Figure = Picture(figsize=(7.2, 7.9), layout="constrained", facecolor=palette.paper)
        ax = figure.add_subplot()
    raster = _panel(ax, source, palette, source.title)
    _legend(ax, source, raster, palette)
    root = ax.get_figure(root=True)
    assert root is not None
    return root


def draw_all(sources: list[Source], names: list[str], dark: bool) -> Figure:
    palette = DARK if dark else LIGHT
    columns = min(len(sources), 3)
    rows = -(-len(sources) // columns)
    figure = Picture(
        figsize=(5.6 * columns, 6.2 * rows), layout="constrained", facecolor=palette.paper
    )
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(len(sources))]
    for ax, source, name in zip(axes, sources, names, strict=True):
        raster = _panel(ax, source, palette, f"{name}: {source.title}")
        _legend(ax, source, raster, palette)
    return figure


def _panel(ax: Axes, source: Source, palette: Palette, title: str) -> Raster:
    raster = source.raster(CELLS, CELLS)
    first = source.q_offset
    ax.set_facecolor(palette.paper)
    ax.imshow(
        colours(raster, palette).numpy(),
        extent=(0, raster.kv.cells * raster.kv.cell, raster.q.cells * raster.q.cell, 0),
        interpolation="nearest",
        aspect="equal" if _alike(source) else "auto",
    )
    ax.set_xlim(0, source.kv_len)
    ax.set_ylim(source.q_len, 0)
    _grid(ax, raster, palette)
    _outline(ax, source, raster, palette)
    wide = max(30, int(ax.get_position().width * ax.figure.get_figwidth() * 12))
    under = f"{words.lengths(raster)}; {words.counts(raster)}; {words.scale(raster, 'pixel')}"
    ax.set_title(
        "\n".join(textwrap.wrap(title, wide)), loc="left", fontsize=10, color=palette.ink,
        fontweight="bold", pad=8 + 11 * len(textwrap.wrap(under, wide + 14)), parse_math=False,
    )  # fmt: skip
    ax.annotate(
        "\n".join(textwrap.wrap(under, wide + 14)), (0, 1), (0, 5), xycoords="axes fraction",
        textcoords="offset points", fontsize=8, color=palette.ink, va="bottom",
    )  # fmt: skip
    _ticks(ax, raster, first, palette)
    return raster


def _alike(source: Source) -> bool:
    lengths = (source.q_len, source.kv_len)
    return max(lengths) <= 8 * min(lengths)


def _ticks(ax: Axes, raster: Raster, first: int, palette: Palette) -> None:
    """Positions on both axes; those of small pictures under the middle of their cells."""
    middle = 0.5 if raster.q.cell == raster.kv.cell == 1 else 0.0
    for axis, length, start in ((ax.xaxis, raster.kv.length, 0), (ax.yaxis, raster.q.length, first)):
        step = _even(length)
        marks = [float(t) for t in range(-start % step, length, step)]
        axis.set_ticks([t + middle for t in marks])
        axis.set_major_formatter(
            FuncFormatter(lambda at, _, start=start: f"{round(at - middle) + start:,}")
        )
    ax.tick_params(colors=palette.ink, labelsize=8)
    ax.set_xlabel("position of the key", color=palette.ink, fontsize=9)
    ax.set_ylabel("position of the query", color=palette.ink, fontsize=9)
    for spine in ax.spines.values():
        spine.set_color(palette.line)


def _even(length: int) -> int:
    """A power of two that gives four to eight ticks: tiles end there."""
    step = 1
    while length / step > 8:
        step *= 2
    return step


def _grid(ax: Axes, raster: Raster, palette: Palette) -> None:
    if max(raster.q.tiles, raster.kv.tiles) > _TILES:
        return
    across = [[(0, y), (raster.kv.length, y)] for y in _borders(raster.q)]
    down = [[(x, 0), (x, raster.q.length)] for x in _borders(raster.kv)]
    ax.add_collection(
        LineCollection([*across, *down], colors=palette.line, linewidths=0.7, zorder=2),
        autolim=False,
    )


def _borders(axis: Axis) -> range:
    return range(axis.tile, axis.length, axis.tile)


def _outline(ax: Axes, source: Source, raster: Raster, palette: Palette) -> None:
    boxes = _outlined(source, raster)
    if boxes is None:
        return
    rectangles = [Rectangle((k0, q0), k1 - k0, q1 - q0) for q0, q1, k0, k1 in boxes]
    ax.add_collection(
        PatchCollection(
            rectangles, facecolor="none", edgecolor=palette.candidate, linewidth=0.9, zorder=3
        ),
        autolim=False,
    )


def _outlined(source: Source, raster: Raster) -> list[list[int]] | None:
    """Candidates, where each is wide enough to have an outline."""
    if source.select is None:
        return None
    least = max(raster.q.length, raster.kv.length) / 128
    if min(source.select.q_block, source.select.kv_block) < least:
        return None
    boxes = source.boxes(_CANDIDATES)
    return None if boxes is None else boxes.tolist()


def _legend(ax: Axes, source: Source, raster: Raster, palette: Palette) -> None:
    colour = {
        words.FULL: palette.full, words.SEEN: palette.seen, words.HIDDEN: palette.hidden,
        words.SKIPPED: palette.paper,
    }  # fmt: skip
    keys = [Patch(facecolor=c, edgecolor=palette.line, label=n) for n, c in colour.items()]
    if source.select is not None:
        if _outlined(source, raster) is None:
            keys.append(
                Patch(facecolor="none", edgecolor="none", label="candidates: too many to outline")
            )
        else:
            keys.append(
                Patch(facecolor="none", edgecolor=palette.candidate, label=words.CANDIDATE)
            )
    ax.legend(
        handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=3, fontsize=8,
        frameon=False, labelcolor=palette.ink,
    )  # fmt: skip
