"""The rates of the cost model from what a bench has measured.

    python -m flexsparse.measure.calibration results/cost_grid/rows.jsonl …

prints the rates that explain the times best, and how near the predictions come before and after.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flexsparse.cost import Counts, Gathered, Job, Pairs, Read, Tiles, predicted_ms
from flexsparse.device import Ceilings
from flexsparse.rates import RATES, Rates

_KINDS: dict[str, Callable[..., Counts]] = {
    "Tiles": Tiles, "Pairs": Pairs, "Gathered": Gathered, "Read": Read
}  # fmt: skip
# By how much a rate is changed to see whether it explains more: from coarse to fine.
_STEPS = (1.3, 1.12, 1.05, 1.02, 1.005)
# A ratio this far off counts as itself; a nearer one less, as what is within reach is good enough.
_NEAR = math.log(1.25)


class Point(NamedTuple):
    """A job that took ``ms`` on a box; ``chosen`` says whether a plan would have run it so."""

    name: str
    job: Job
    box: Ceilings
    ms: float
    chosen: bool


def points(files: Iterable[Path]) -> list[Point]:
    """All that was timed and predicted in the records of a bench."""
    found = []
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if not (ways := record.get("ways")):
                continue
            box = Ceilings(**ways["box"])
            for i, way in enumerate(ways["ways"]):
                if way["job"] is not None:
                    name = f"{record['name']}: {way['backend']} {way['tile']} {way['pack']}"
                    found.append(Point(name, _job(way["job"]), box, way["ms"], i == 0))
    return found


def _job(said: dict[str, Any]) -> Job:
    counts = dict(said["counts"])
    kind = _KINDS[counts.pop("kind")]
    head_dim, v_head_dim = said["dims"]
    return Job(**(said | {"counts": kind(**counts), "dims": (head_dim, v_head_dim)}))


def calibrated(given: Sequence[Point], start: Rates = RATES) -> Rates:
    """The rates under which predictions come nearest: each is changed in turn while that helps.

    A rate that no point asks about stays as it is.

    >>> job = Job("dense", Pairs(1e9), (128, 128), 2, grads=False)
    >>> box = Ceilings(4e12, 7e14, 132)
    >>> seen = Point("", job, box, predicted_ms(job, box, Rates(dense=0.6)), True)
    >>> round(calibrated([seen], Rates(dense=0.75)).dense, 2)
    0.6
    """
    best, least = start, off(given, start)
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for name in Rates._fields:
                for factor in (step, 1 / step):
                    rates = best._replace(**{name: getattr(best, name) * factor})
                    if (now := off(given, rates)) < least - 1e-9:
                        best, least, moved = rates, now, True
    return best


def off(given: Sequence[Point], rates: Rates) -> float:
    """How far predictions are from the clock: mean of the squared logarithm of their ratio, of a far one
    the logarithm alone, so that a few that no model explains do not decide. What plans chose counts
    twice."""
    total = weight = 0.0
    for point in given:
        away = abs(math.log(predicted_ms(point.job, point.box, rates) / point.ms))
        share = 2.0 if point.chosen else 1.0
        total += share * (away**2 if away < _NEAR else _NEAR * (2 * away - _NEAR))
        weight += share
    return total / weight


def near(given: Sequence[Point], rates: Rates) -> float:
    """The share of points predicted within 25 %."""
    ratios = [predicted_ms(p.job, p.box, rates) / p.ms for p in given]
    return sum(abs(ratio - 1) <= 0.25 for ratio in ratios) / len(ratios)


def main(files: Sequence[str]) -> None:
    given = points(map(Path, files))
    if not given:
        sys.exit(
            f"no predictions in {', '.join(files) or 'no file'}: they stand in records of a bench whose rows "
            "have ways, made on a CUDA device; on a CPU nothing is predicted"
        )
    chosen = [point for point in given if point.chosen]
    found = calibrated(given)
    for name, rates in (("before", RATES), ("after", found)):
        print(f"{name}: {near(chosen, rates):.0%} of {len(chosen)} choices, {near(given, rates):.0%} of "
              f"{len(given)} ways within 25 %")  # fmt: skip
    for name, before, after in zip(Rates._fields, RATES, found, strict=True):
        if before != after:
            print(f"    {name}: float = {after:.4g}  # was {before:.4g}")
    for point in chosen:
        ratio = predicted_ms(point.job, point.box, found) / point.ms
        if abs(ratio - 1) > 0.25:
            print(f"far: {point.name}: {point.ms:.4g} ms, {ratio:.2f} predicted")


if __name__ == "__main__":
    main(sys.argv[1:])
