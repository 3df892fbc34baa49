"""A raster in characters: two cells a character where the terminal has half blocks, colours if it can.

colours   blue: seen, in a full tile; orange: in a partial one; pale: computed, not seen
half      █ ▀ ▄ the pairs seen, or ░ ▒ ▓ their share; · computed and nothing of it seen
ascii     # seen in a full tile; + * their share in partial ones; . computed and nothing seen

Where a cell is one pair, x and violet are candidates that the rule hides.
"""

from __future__ import annotations

import re
import textwrap
from typing import Literal

import torch
from torch import Tensor

from flexsparse.viz import words
from flexsparse.viz.palette import LIGHT, colours, rgb
from flexsparse.viz.raster import Raster
from flexsparse.viz.source import Source

Style = Literal["colour", "half", "ascii"]

# Wider than this, a picture is higher than a screen.
_WIDEST = 128
_RESET = "\x1b[0m"


def draw(source: Source, width: int, style: Style) -> str:
    """Title, counts, picture with positions, and what the signs mean, in ``width`` columns.

    >>> from flexsparse.masks import SlidingWindow
    >>> from flexsparse.viz.source import source
    >>> print(draw(source(SlidingWindow(3), 24, tile=16), 48, "half"))
    SlidingWindow(size=3)
    24 queries x 24 keys; 69 pairs seen (12.0%), 0
    full and 3 partial tiles of 16x16, inflation
    11.1; a half character is one pair
        0       8       16
      0 █▄··············
        ▀██▄············
        ··▀██▄··········
        ····▀██▄········
      8 ······▀██▄······
        ········▀██▄····
        ··········▀██▄··
        ············▀██▄
     16 ··············▀██▄······
        ················▀██▄····
        ··················▀██▄··
        ····················▀██▄
    █ ▀ ▄ seen  · computed, not seen    skipped
    """
    gutter = len(f"{max(abs(source.q_offset), abs(source.q_offset + source.q_len)):,}") + 2
    columns = max(8, min(width - gutter, _WIDEST))
    q, _ = source.axes(columns, columns)
    if style == "ascii" and q.cell > 1:
        # A character is about twice as high as wide.
        raster = source.raster(-(-q.length // (2 * q.cell)), columns, square=False)
    else:
        raster = source.raster(columns, columns)
    wasted = _wasted(source, raster)
    drawn = {"colour": _pixels, "half": _halves, "ascii": _ascii}[style]
    lines = drawn(raster, wasted)
    per_line = raster.q.cell * (1 if style == "ascii" else 2)
    return "\n".join(
        [
            *textwrap.wrap(source.title, width),
            *textwrap.wrap(_under(raster, style), width),
            *_framed(lines, per_line, raster, source.q_offset, gutter),
            *_wrapped(_meaning(raster, wasted, style), width),
        ]
    )


def _under(raster: Raster, style: Style) -> str:
    cell = "character" if style == "ascii" else "half character"
    return f"{words.lengths(raster)}; {words.counts(raster)}; {words.scale(raster, cell)}"


def _wasted(source: Source, raster: Raster) -> Tensor:
    """bool ``[rows, columns]``: candidates that the rule hides, where a cell is one pair."""
    if source.select is None or not raster.q.cell == raster.kv.cell == 1:
        return torch.zeros(raster.seen.shape, dtype=torch.bool, device="cpu")
    return source.select.dense()[0, 0] & (raster.seen == 0)


def _framed(lines: list[str], per_line: int, raster: Raster, first: int, gutter: int) -> list[str]:
    """Positions of the keys above, those of the queries to the left."""
    marks = ""
    for column in range(0, raster.kv.cells, 8):
        text = f"{column * raster.kv.cell:,}"
        if len(marks) <= column and column + len(text) <= max(raster.kv.cells, len(text)):
            marks = marks.ljust(column) + text + " "
    framed = [(" " * gutter + marks).rstrip()]
    for i, line in enumerate(lines):
        label = f"{first + i * per_line:,}" if i % 4 == 0 else ""
        framed.append(f"{label:>{gutter - 1}} {line}".rstrip(" "))
    return framed


def _pixels(raster: Raster, wasted: Tensor) -> list[str]:
    """Upper half blocks: the ink is the upper cell, the ground the lower one."""
    picture = colours(raster, LIGHT)
    picture[wasted] = rgb(LIGHT.candidate)
    if picture.shape[0] % 2:
        picture = torch.cat([picture, picture[-1:]])
    at = [[_code(cell) for cell in row] for row in (picture * 255).round().int().tolist()]
    lines = []
    for i, (upper, lower) in enumerate(zip(at[::2], at[1::2], strict=True)):
        # Past the last query there is nothing: the terminal's own ground.
        past = 2 * i + 1 >= raster.q.cells
        line, last = "", ""
        for ink, ground in zip(upper, lower, strict=True):
            wanted = f"\x1b[38;2;{ink}m" + ("" if past else f"\x1b[48;2;{ground}m")
            line += ("" if wanted == last else wanted) + "▀"
            last = wanted
        lines.append(line + _RESET)
    return lines


def _code(cell: list[int]) -> str:
    return ";".join(map(str, cell))


def _halves(raster: Raster, wasted: Tensor) -> list[str]:
    sign = _half if raster.q.cell == raster.kv.cell == 1 else _shade
    held = torch.stack([raster.seen, raster.full + raster.partial, wasted.double()])
    if raster.q.cells % 2:
        # Half a line is left over: half a block has a sign, half a share has not.
        last = held[:, -1:]
        held = torch.cat([held, torch.zeros_like(last) if sign is _half else last], 1)
    (upper, _, _), (lower, _, _) = held[:, ::2].tolist(), held[:, 1::2].tolist()
    _, visited, hidden = ((held[:, ::2] + held[:, 1::2]) > 0).tolist()
    return [
        "".join(
            "x" if hides and not (above or below) else sign(above, below, touched)
            for above, below, touched, hides in zip(*line, strict=True)
        )
        for line in zip(upper, lower, visited, hidden, strict=True)
    ]


def _half(upper: float, lower: float, visited: bool) -> str:
    if upper and lower:
        return "█"
    return "▀" if upper else "▄" if lower else "·" if visited else " "


def _shade(upper: float, lower: float, visited: bool) -> str:
    share = (upper + lower) / 2
    if not share:
        return "·" if visited else " "
    return "█" if share == 1 else "░▒▓"[min(2, int(3 * share))]


def _ascii(raster: Raster, wasted: Tensor) -> list[str]:
    cells = (raster.seen, raster.full, raster.partial, wasted)
    return ["".join(map(_sign, *row)) for row in zip(*(x.tolist() for x in cells), strict=True)]


def _sign(seen: float, full: float, partial: float, wasted: bool) -> str:
    if wasted:
        return "x"
    if not full and not partial:
        return " "
    if full >= 1:
        return "#"
    return "." if not seen else "+" if seen < 0.5 else "*"


def _meaning(raster: Raster, wasted: Tensor, style: Style) -> list[str]:
    marked = [f"x {words.WASTED}"] if bool(wasted.any()) else []
    if style == "colour":
        swatch = {words.FULL: LIGHT.full, words.SEEN: LIGHT.seen, words.HIDDEN: LIGHT.hidden}
        swatch[words.SKIPPED] = LIGHT.paper
        if marked:
            swatch[words.WASTED] = LIGHT.candidate
        inks = {name: _code((rgb(c) * 255).round().int().tolist()) for name, c in swatch.items()}
        return [f"\x1b[38;2;{ink}m█{_RESET} {name}" for name, ink in inks.items()]
    if style == "ascii":
        signs = [f"# {words.FULL}", f"+ * {words.SEEN}", f". {words.HIDDEN}"]
        return [*signs, f"  {words.SKIPPED}", *marked]
    seen = "█ ▀ ▄ seen" if raster.q.cell == raster.kv.cell == 1 else "░ ▒ ▓ █ share seen"
    return [seen, f"· {words.HIDDEN}", f"  {words.SKIPPED}", *marked]


def _wrapped(parts: list[str], width: int) -> list[str]:
    """Parts in a row while they fit; what colours a terminal takes no room."""
    lines: list[str] = [""]
    for part in parts:
        room = width - _shown(lines[-1]) - 2
        if lines[-1] and _shown(part) > room:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + part
    return lines


def _shown(text: str) -> int:
    return len(re.sub(r"\x1b\[[\d;]*m", "", text))
