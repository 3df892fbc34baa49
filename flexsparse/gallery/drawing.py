"""Pictures of rules and scores as inline SVG, in the page's own colours."""

from __future__ import annotations

from html import escape
from itertools import groupby

import torch

from flexsparse.scores import ScoreRule, trace_score

# Pairs a side of a score's picture, and how far its curve goes to either side.
SIDE = 16
REACH = 8.0


def drawn_rule(text: str, caption: str) -> str:
    """A picture of `flexsparse.viz` in ``#`` and ``.``, a cell a character."""
    lines = text.splitlines()
    runs = []
    for y, line in enumerate(lines):
        x = 0
        for sign, cells in groupby(line):
            width = len(list(cells))
            if sign == "#":
                runs.append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    wide, high = len(lines[0]), len(lines)
    grid = "".join(f"M{x} 0v{high}" for x in range(1, wide))
    grid += "".join(f"M0 {y}h{wide}" for y in range(1, high))
    return _svg(
        f'<rect class="unseen" width="{wide}" height="{high}"/>'
        f'<path class="seen" d="{"".join(runs)}"/><path class="grid" d="{grid}"/>',
        wide,
        high,
        caption,
    )


def drawn_score(score: ScoreRule, caption: str) -> tuple[str, str]:
    """What head 0 makes of a score of 1 at each pair; or of each score, where pairs do not matter.

    Returns the picture, and what it shows.
    """
    if trace_score(score).uses & {"q_idx", "kv_idx"}:
        return _heat(score, caption)
    return _curve(score, caption)


@torch.no_grad()
def _heat(score: ScoreRule, caption: str) -> tuple[str, str]:
    at, zero = torch.arange(SIDE), torch.tensor(0)
    new = score(torch.tensor(1.0), zero, zero, at[:, None], at[None]).expand(SIDE, SIDE)
    low, high = float(new.min()), float(new.max())
    cells = "".join(
        f'<rect class="seen" x="{x}" y="{y}" width="1" height="1" '
        f'opacity="{(value - low) / ((high - low) or 1):.2f}"/>'
        for y, row in enumerate(new.tolist())
        for x, value in enumerate(row)
    )
    ground = f'<rect class="unseen" width="{SIDE}" height="{SIDE}"/>'
    shown = (
        f"a score of 1 at each query (row) and key (column): from {low:.3g} (pale) to {high:.3g}"
    )
    return _svg(ground + cells, SIDE, SIDE, caption), shown


@torch.no_grad()
def _curve(score: ScoreRule, caption: str) -> tuple[str, str]:
    zero, raw = torch.tensor(0), torch.linspace(-REACH, REACH, 65)
    new = score(raw, zero, zero, zero, zero)
    scale = SIDE / 2 / REACH
    points = " ".join(
        f"{SIDE / 2 + x * scale:.2f},{SIDE / 2 - y * scale:.2f}"
        for x, y in zip(raw.tolist(), new.tolist(), strict=True)
    )
    middle = SIDE / 2
    picture = (
        f'<rect class="unseen" width="{SIDE}" height="{SIDE}"/>'
        f'<path class="grid" d="M{middle} 0v{SIDE}M0 {middle}h{SIDE}"/>'
        f'<polyline class="curve" points="{points}"/>'
    )
    shown = f"the new score over the old, both from {-REACH:g} to {REACH:g}"
    return _svg(picture, SIDE, SIDE, caption), shown


def _svg(inside: str, wide: int, high: int, caption: str) -> str:
    return (
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(caption, quote=True)}">'
        f"{inside}</svg>"
    )
