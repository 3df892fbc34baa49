"""A raster in matplotlib."""

from __future__ import annotations

import io
import textwrap
from typing import Any

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
    if ax is not None:
        keys = _panel(ax, source, palette, source.title, 60)
        ax.legend(**_legend(keys, palette, 2), loc="upper center", bbox_to_anchor=(0.5, -0.12))
        root = ax.get_figure(root=True)
        assert root is not None
        return root
    figure = Picture(figsize=(7.2, 8.3), layout="constrained", facecolor=palette.paper)
    title = "\n".join(textwrap.wrap(source.title, 72))
    figure.suptitle(
        title, x=0.02, ha="left", fontsize=11, fontweight="bold", color=palette.ink,
        parse_math=False,
    )  # fmt: skip
    keys = _panel(figure.add_subplot(), source, palette, "", 92)
    figure.legend(**_legend(keys, palette, 3), loc="outside lower center")
    return figure


def draw_all(sources: list[Source], names: list[str], dark: bool) -> Figure:
    palette = DARK if dark else LIGHT
    if len(sources) == 1:
        return draw(sources[0], dark, None)
    columns = min(len(sources), 3)
    rows = -(-len(sources) // columns)
    figure = Picture(
        figsize=(5.4 * columns, 6.0 * rows + 0.4), layout="constrained", facecolor=palette.paper
    )
    keys: dict[str, Patch] = {}
    for i, (source, name) in enumerate(zip(sources, names, strict=True)):
        ax = figure.add_subplot(rows, columns, i + 1)
        keys |= _panel(ax, source, palette, f"{name}: {source.title}", 62)
    figure.legend(**_legend(keys, palette, 2 * columns), loc="outside lower center")
    return figure


def _panel(ax: Axes, source: Source, palette: Palette, title: str, wide: int) -> dict[str, Patch]:
    """Draws one and returns what its legend needs."""
    raster = source.raster(CELLS, CELLS)
    first = source.q_offset
    ax.set_facecolor(palette.paper)
    ax.imshow(
        colours(raster, palette).numpy(),
        extent=(0, raster.kv.cells * raster.kv.cell, raster.q.cells * raster.q.cell, 0),
        aspect="equal" if source.alike else "auto",
    )
    # A frame on the first column of tiles would hide it.
    ax.set_xlim(-source.kv_len / 250, source.kv_len * (1 + 1 / 250))
    ax.set_ylim(source.q_len * (1 + 1 / 250), -source.q_len / 250)
    _grid(ax, raster, palette)
    _outline(ax, source, raster, palette)
    under = f"{words.lengths(raster)}; {words.counts(raster)}; {words.scale(raster, 'pixel')}"
    lines = [*textwrap.wrap(title, wide), *textwrap.wrap(under, wide)]
    ax.set_title("\n".join(lines), loc="left", fontsize=8.5, color=palette.ink, parse_math=False)
    _ticks(ax, raster, first, palette)
    return _keys(source, raster, palette)


def _ticks(ax: Axes, raster: Raster, first: int, palette: Palette) -> None:
    """Positions on both axes; those of small pictures under the middle of their cells."""
    middle = 0.5 if raster.q.cell == raster.kv.cell == 1 else 0.0
    for axis, length, start in (
        (ax.xaxis, raster.kv.length, 0),
        (ax.yaxis, raster.q.length, first),
    ):
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


def _keys(source: Source, raster: Raster, palette: Palette) -> dict[str, Patch]:
    colour = {
        words.FULL: palette.full, words.SEEN: palette.seen, words.HIDDEN: palette.hidden,
        words.SKIPPED: palette.paper,
    }  # fmt: skip
    keys = {n: Patch(facecolor=c, edgecolor=palette.line) for n, c in colour.items()}
    if source.select is not None:
        drawn = _outlined(source, raster) is not None
        name = words.CANDIDATE if drawn else "candidates: too small to outline"
        keys[name] = Patch(facecolor="none", edgecolor=palette.candidate if drawn else "none")
    return keys


def _legend(keys: dict[str, Patch], palette: Palette, columns: int) -> dict[str, Any]:
    return {
        "handles": list(keys.values()), "labels": list(keys), "ncols": columns, "fontsize": 8.5,
        "frameon": False, "labelcolor": palette.ink,
    }  # fmt: skip
