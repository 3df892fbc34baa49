"""A raster as SVG inside a page: no script, no font, no file beside it."""

from __future__ import annotations

from flexsparse.viz.axis import Axis
from flexsparse.viz.palette import LIGHT, colours
from flexsparse.viz.raster import Raster
from flexsparse.viz.source import Source

CELLS = 64
_CANDIDATES = 1024


def draw(source: Source, raster: Raster, size: int = 224) -> str:
    """``<svg>`` of about ``size`` by ``size`` CSS pixels, on paper of its own for light and dark pages."""
    rows, columns = raster.q.cells, raster.kv.cells
    step = size / max(rows, columns)
    height, width = (max(4.0, n * step) for n in (rows, columns))
    picture = (colours(raster, LIGHT) * 255).round().int().tolist()
    parts = [f'<rect width="{columns}" height="{rows}" fill="{LIGHT.paper}"/>']
    for y, row in enumerate(picture):
        parts += _runs(y, [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in row])
    parts += _grid(raster.q, raster.kv)
    parts += _outlines(source, raster.q, raster.kv)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" shape-rendering="crispEdges" '
        f'style="border:1px solid {LIGHT.line}">{"".join(parts)}</svg>'
    )


def _runs(y: int, row: list[str]) -> list[str]:
    """Neighbours of one colour as one rectangle; paper is there already."""
    found, start = [], 0
    for x in range(1, len(row) + 1):
        if x == len(row) or row[x] != row[start]:
            if row[start] != LIGHT.paper:
                found.append(
                    f'<rect x="{start}" y="{y}" width="{x - start}" height="1" fill="{row[start]}"/>'
                )
            start = x
    return found


def _grid(q: Axis, kv: Axis) -> list[str]:
    if max(q.tiles, kv.tiles) > 16:
        return []
    across = [f"M0 {y / q.cell:g}H{kv.cells}" for y in range(q.tile, q.length, q.tile)]
    down = [f"M{x / kv.cell:g} 0V{q.cells}" for x in range(kv.tile, kv.length, kv.tile)]
    path = "".join(across + down)
    return [_path(path, LIGHT.line)] if path else []


def _outlines(source: Source, q: Axis, kv: Axis) -> list[str]:
    """Candidates, where each is at least a cell."""
    select = source.select
    if select is None or select.q_block < 2 * q.cell or select.kv_block < 2 * kv.cell:
        return []
    boxes = source.boxes(_CANDIDATES)
    if boxes is None:
        return []
    path = "".join(
        f"M{k0 / kv.cell:g} {q0 / q.cell:g}H{k1 / kv.cell:g}V{q1 / q.cell:g}H{k0 / kv.cell:g}Z"
        for q0, q1, k0, k1 in boxes.tolist()
    )
    return [_path(path, LIGHT.candidate)] if path else []


def _path(path: str, colour: str) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" vector-effect="non-scaling-stroke" '
        'shape-rendering="auto"/>'
    )
