"""Quality against the physical budget: which rows no other row beats in both."""

from __future__ import annotations

from typing import Any, NamedTuple


class Point(NamedTuple):
    """A row: physical pairs in parts of the baseline's pairs, attention mass kept, and whether no row beats it."""

    name: str
    physical: float
    mass: float
    best: bool


class Mark(NamedTuple):
    """A point and where it stands in the drawing."""

    point: Point
    x: float
    y: float


class Picture(NamedTuple):
    """What the report draws: marks, the front as a line, and the labelled ticks of the x axis."""

    marks: list[Mark]
    front: str
    ticks: list[tuple[float, str]]


def points(rows: list[dict[str, Any]]) -> list[Point]:
    """Of finished rows that see nothing beside the baseline, by rising physical budget.

    A row is beaten by one that keeps as much or more of as many pairs or fewer, unless both are equal.

    >>> [p.best for p in points([
    ...     {"name": n, "status": "ok", "mass_kept": m, "pairs_outside": 0,
    ...      "budget": {"physical_pairs": c}, "dense": {"pairs": 100}}
    ...     for n, m, c in (("a", 0.5, 20), ("b", 0.4, 30), ("c", 0.9, 60))])]
    [True, False, True]
    """
    found = [
        (row["name"], row["budget"]["physical_pairs"] / row["dense"]["pairs"], row["mass_kept"])
        for row in rows
        if row["status"] == "ok"
        and row["mass_kept"] is not None
        and row["dense"]["pairs"]
        and not row["pairs_outside"]
    ]
    found.sort(key=lambda row: (row[1], -row[2]))
    return [
        Point(
            name,
            physical,
            mass,
            not any(
                p <= physical and m >= mass and (p, m) != (physical, mass) for _, p, m in found
            ),
        )
        for name, physical, mass in found
    ]


# The drawing, in its own units: a frame with room for labels on its left and below.
LEFT, TOP, WIDTH, HEIGHT = 48, 12, 560, 260


def picture(rows: list[dict[str, Any]]) -> Picture | None:
    """None where there are not two rows to compare."""
    shown = points(rows)
    if len(shown) < 2:
        return None
    widest = max(point.physical for point in shown)
    marks = [
        Mark(p, LEFT + WIDTH * p.physical / widest, TOP + HEIGHT * (1 - p.mass)) for p in shown
    ]
    front = " ".join(f"{m.x:.1f},{m.y:.1f}" for m in marks if m.point.best)
    ticks = [(LEFT + WIDTH * i / 4, f"{widest * i / 4:.0%}") for i in range(5)]
    return Picture(marks, front, ticks)
