"""The answer in words: did the hardware skip what the algorithm promised to skip?"""

from __future__ import annotations

from typing import Any

from flexsparse.experiment.pareto import points

# What counts as kept: launches and a clock's noise take a few per cent of any row.
_KEPT = 0.9


def verdict(rows: list[dict[str, Any]]) -> str:
    """A few sentences over the finished rows of a run, as they stand in ``rows.jsonl``."""
    skipping = [
        row
        for row in rows
        if row["status"] == "ok" and row["delivered"] is not None and row["promised"] > 1
    ]
    # Other work than the baseline's is not less of it.
    others = [row["name"] for row in skipping if row["pairs_outside"]]
    sparse = [row for row in skipping if not row["pairs_outside"]]
    if not sparse:
        said = ["There is no answer: no row that skips work of the baseline was finished."]
    else:
        said = [f"{_word(sparse)}: {_best(sparse)}", _faster(sparse)]
    if others:
        said.append(f"Left out, as they see pairs outside the baseline: {', '.join(others)}.")
    said += [
        f"The {backend} backend is plain torch{here}, not a fused kernel: it proves results and counts "
        "work; its times do not foretell those of a GPU kernel."
        for backend, here in (("tiles", ""), ("gather", " on CPU"), ("decode", " on CPU"))
        if any(row.get("backend") == backend and (not here or _on_cpu(row)) for row in rows)
    ]
    for status in ("wrong", "failed"):
        bad = [row["name"] for row in rows if row["status"] == status]
        if bad:
            said.append(f"{status.capitalize()}: {', '.join(bad)}.")
    return " ".join(said)


def _on_cpu(row: dict[str, Any]) -> bool:
    return str(row["plan"]).splitlines()[0].endswith(" on cpu")


def baselines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each dense attention that rows are held against, once, with the ``rows`` beside it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "dense" in row:
            dense = row["dense"]
            one = found.setdefault(repr(sorted(dense.items(), key=str)), {**dense, "rows": []})
            one["rows"].append(row["name"])
    return list(found.values())


def baseline(rows: list[dict[str, Any]]) -> str:
    """What "dense" means in this run; rows whose queries stand elsewhere have one of their own."""
    found = baselines(rows)
    said = [
        f"{dense['rule']}, by {dense['by']}, {dense['ms']:.3g} ms for {dense['pairs']:,} pairs"
        + (f" beside {', '.join(dense['rows'])}" if len(found) > 1 else "")
        for dense in found
    ]
    if not said:
        return "No baseline was timed."
    return f"Baseline (dense attention): {'; '.join(said)}."


def noted(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(row, note) of all rows."""
    return [(row["name"], note) for row in rows for note in row.get("notes", ())]


def _word(sparse: list[dict[str, Any]]) -> str:
    if all(row["delivered"] >= _KEPT for row in sparse):
        return "Yes, it skipped what was promised"
    if any(row["got"] > 1 for row in sparse):
        return "In part"
    return "No"


def _best(sparse: list[dict[str, Any]]) -> str:
    # Who keeps less attention in no less time is no answer, however small the promise.
    left = [row for row in sparse if not any(_beats(other, row) for other in sparse)]
    closest = max(left, key=_worth)
    # A row slower than dense may deliver most of a small promise, but it is no part of a yes.
    best = max([row for row in left if row["got"] > 1] or left, key=_worth)
    among = "" if best is closest else " of those that beat dense"
    return (
        f"'{best['name']}' came closest{among}{_keeping(best)}. It promised {best['promised']:.1f}x less work than dense "
        f"attention and took {_speed(best['got'])}: {best['delivered']:.0%} of the promise was "
        f"delivered.{_more(sparse, best)}"
    )


def _beats(other: dict[str, Any], row: dict[str, Any]) -> bool:
    if other["mass_kept"] is None or row["mass_kept"] is None:
        return False
    return bool(other["mass_kept"] > row["mass_kept"] and other["got"] >= row["got"])


def _worth(row: dict[str, Any]) -> float:
    """What was delivered, for as much of the attention as was kept."""
    kept = row["mass_kept"]
    return _delivered(row) * (1.0 if kept is None else kept)


def _more(sparse: list[dict[str, Any]], best: dict[str, Any]) -> str:
    most = max(sparse, key=_delivered)
    if most["mass_kept"] is None or _delivered(most) <= _delivered(best):
        return ""
    return (
        f" '{most['name']}' delivered {most['delivered']:.0%} of its promise, keeping "
        f"{most['mass_kept']:.0%}."
    )


def front(rows: list[dict[str, Any]]) -> str:
    """The rows that no other beats, with what each keeps of how many pairs; nothing for fewer than two rows."""
    found = points(rows)
    if len(found) < 2:
        return ""
    best = "; ".join(f"{p.name} {p.mass:.1%} for {p.physical:.1%}" for p in found if p.best)
    return f"No other row keeps as much attention for as few physical pairs: {best}."


def _delivered(row: dict[str, Any]) -> float:
    return float(row["delivered"])


def _keeping(row: dict[str, Any]) -> str:
    kept = row["mass_kept"]
    return "" if kept is None else f", keeping {kept:.0%} of the attention mass"


def _speed(got: float) -> str:
    return f"{got:.2f}x less time" if got >= 1 else f"{1 / got:.2f}x more time"


def _faster(sparse: list[dict[str, Any]]) -> str:
    faster = sum(row["got"] > 1 for row in sparse)
    rows = "row" if len(sparse) == 1 else "rows"
    return f"{faster} of {len(sparse)} sparse {rows} beat dense, the selector and layout included."
