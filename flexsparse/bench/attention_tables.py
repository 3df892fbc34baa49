"""What attention delivered, beside whom, and that it was right: the tables of rows that time it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from flexsparse.bench.form import Record, add, table
from flexsparse.experiment.columns import NOTHING, number

_MODES = {"forward": "", "training": "  and backward"}
_STEP_TIMES = (("eager_ms", "eager"), ("wall_ms", "wall"), ("graph_ms", "graph"))


def attention_tables(records: list[Record]) -> list[Table]:
    """Those that have lines, the answer first."""
    makers = (_delivered, _beside, _steps, _uneven, _membership, _linear, _proof)
    return [made for make in makers if (made := make(records)).row_count]


def _delivered(records: list[Record]) -> Table:
    made = table(
        "Delivered = (dense / total) / promised = selector x worktable x kernel; ms, total = layout and "
        "kernel in one call",
        ["row", "by"],
        [
            "dense", "layout", "kernel", "total", "promised", "got", "delivered", "selector",
            "worktable", "kernel", "inflation",
        ],
    )  # fmt: skip
    for record, mode, found in _timed(records):
        attention = record["attention"]
        times, dense = found["time_ms"], found["dense"]
        add(
            made, *_named(record, mode), f"{number(dense['ms'])} {dense['by']}",
            *(number(times[part]) for part in ("layout", "kernel", "total")),
            f"{number(found['promised'])}x", f"{number(found['got'])}x", number(found["delivered"]),
            *(number(found["factors"][n]) for n in ("selector", "worktable", "kernel")),
            number(attention["inflation"]),
        )  # fmt: skip
    return made


def _beside(records: list[Record]) -> Table:
    made = table(
        "Beside other attention: ms with all that stands before it, its kernel, and times ours",
        ["row", "who"],
        ["forward", "kernel", "x", "and backward", "kernel", "x"],
        ["what it does, or why not"],
    )
    seen: set[str] = set()
    for record in records:
        attention = record["attention"] or {}
        if "forward" not in attention or record["name"] in seen:
            continue
        seen.add(record["name"])
        ours = {mode: attention[mode]["time_ms"] for mode in _MODES if mode in attention}
        lines: list[tuple[str, dict[str, Any], str]] = [
            (f"ours, {r['attention']['backend']}", _own(r), "layout inside")
            for r in records
            if r["name"] == record["name"] and "forward" in (r["attention"] or {})
        ]
        for name in attention["forward"]["dense_ms"]:
            took = {mode: attention[mode]["dense_ms"][name] for mode in ours}
            why = next((x for x in took.values() if isinstance(x, str)), None)
            alone = {m: {"total": x} for m, x in took.items() if not isinstance(x, str)}
            lines.append((name, alone, why or "dense"))
        for peer in record["peers"]:
            lines.append((peer["name"], peer, _said(peer)))
        for i, (who, times, said) in enumerate(lines):
            cells = [record["name"] if i == 0 else "", who]
            for mode in _MODES:
                cells += _ratio(times.get(mode) or {}, ours.get(mode), first=i == 0)
            add(made, *cells, said)
        made.add_section()
    return made


def _own(record: Record) -> dict[str, Any]:
    found = record["attention"]
    return {mode: found[mode]["time_ms"] for mode in _MODES if mode in found}


def _said(peer: dict[str, Any]) -> str:
    if peer["reason"]:
        return str(peer["reason"])
    off = peer["difference"]
    said = peer["note"] if off is None else f"{peer['note']}; differs by {number(off)}"
    why = (peer.get("training") or {}).get("reason")
    return f"{said}; {why}" if why else str(said)


def _ratio(times: dict[str, Any], ours: dict[str, Any] | None, first: bool) -> list[str]:
    if ours is None or "total" not in times:
        return [NOTHING, NOTHING, NOTHING]
    kernel = number(times["kernel"]) if "kernel" in times else NOTHING
    ratio = "" if first else f"{number(times['total'] / ours['total'])}x"
    return [number(times["total"]), kernel, ratio]


def _steps(records: list[Record]) -> Table:
    # Without a device there is one kind of time.
    on_cpu = all(record["device"] == "cpu" for record in records)
    shown = _STEP_TIMES[:1] if on_cpu else _STEP_TIMES
    made = table(
        "A decode step, ms, and how many of it the fastest dense one takes",
        ["row", "by", "what"],
        [head for _, name in shown for head in (name, "dense / it")],
        ["why not"],
    )
    for record in records:
        steps = (record["attention"] or {}).get("steps") or []
        lines = [(s["what"], s["cost"] or {}, s["reason"]) for s in steps]
        dense = [cost for what, cost, _ in lines if what.startswith("dense")]
        best = {key: _least(cost.get(key) for cost in dense) for key, _ in shown}
        for peer in record["peers"] if steps else []:
            if "forward" in peer:
                took = {
                    "eager_ms": peer["forward"]["total"],
                    "graph_ms": peer["forward"].get("graph"),
                }
                lines.append((peer["name"], took, "eager with its plan, in a graph without"))
        for i, (what, cost, why) in enumerate(lines):
            named = [record["name"], record["attention"]["backend"]] if i == 0 else ["", ""]
            times = [
                cell
                for key, _ in shown
                for cell in (number(cost.get(key)), _over(best[key], cost.get(key)))
            ]
            add(made, *named, what, *times, why or (not on_cpu and cost.get("no_graph")) or "")
        if steps:
            made.add_section()
    return made


def _least(times: Iterable[float | None]) -> float | None:
    return min((ms for ms in times if ms), default=None)


def _over(a: float | None, b: float | None) -> str:
    return f"{number(a / b)}x" if a and b else NOTHING


def _uneven(records: list[Record]) -> Table:
    made = table(
        "Uneven work: our time over that of as much work spread evenly; others over ours",
        ["row", "by"],
        ["kernel / even", "total / even", "padded ms", "x", "a call a request ms", "x"],
        ["what it is"],
    )
    for record, mode, _ in _timed(records):
        found = record["uneven"]
        if found is None:
            continue
        cells = [number(found[mode]["over_uniform"][part]) for part in ("kernel", "total")]
        said = [found["said"]]
        for key in ("padded", "per_request"):
            other = found[mode].get(key) or {}
            ms, times = other.get("ms"), other.get("times_ours")
            cells += [number(ms), NOTHING if times is None else f"{number(times)}x"]
            if why := other.get("reason") or other.get("by"):
                said.append(f"{key.replace('_', ' ')}: {why}")
        add(made, *_named(record, mode), *cells, "; ".join(said))
    return made


def _membership(records: list[Record]) -> Table:
    made = table(
        "Single keys: our kernel over that of the same blocks, whole",
        ["row", "by"],
        ["kernel", "whole", "kernel / whole", "physical pairs", "whole"],
        ["whole by"],
    )
    for record, mode, found in _timed(records):
        if (beside := record["membership"]) is None:
            continue
        times = (found["time_ms"]["kernel"], beside[mode]["whole_ms"], beside[mode]["over"])
        pairs = (f"{n:,}" for n in beside["physical_pairs"])
        add(made, *_named(record, mode), *map(number, times), *pairs, beside["by"])
    return made


def _linear(records: list[Record]) -> Table:
    made = table(
        "Kernel time against listed tiles: ms = fixed + tiles x slope",
        ["row", "by"],
        ["tiles", "kernel ms", "fixed ms", "us / 1000 tiles", "R²"],
    )
    for record in records:
        if (found := record["linear"]) is None:
            continue
        tiles, ms = (
            " ".join(number(p[key]) for p in found["points"]) for key in ("tiles", "kernel_ms")
        )
        fit = (found["fixed_ms"], found["us_per_1000_tiles"])
        by = found["points"][0]["backend"]
        add(made, record["name"], by, tiles, ms, *map(number, fit), f"{found['r2']:.5f}")
    return made


def _proof(records: list[Record]) -> Table:
    made = table(
        "Proof, in the same run: query rows against fp64, of the error's budget; NaN where no list says",
        ["row", "by"],
        ["checked", "error (plain)", "of budget", "worst", "tiles of NaN", "bits equal"],
    )
    for record in records:
        points = (record["linear"] or {}).get("points") or [record["attention"]]
        for found in filter(None, points):
            check, hidden = found["check"], found["unlisted"]
            shares = {
                n: e / budget if budget else 0.0 for n, (e, _, budget) in check["errors"].items()
            }
            worst = max(shares, key=lambda n: shares[n])
            equal = {True: "yes", False: "NO", None: NOTHING}[hidden["equal"]]
            add(
                made, record["name"], found["backend"],
                f"{check['rows']} {'ok' if check['ok'] else 'WRONG'}",
                f"{number(check['error'])} ({number(check['plain_error'])})", f"{shares[worst]:.0%}", worst,
                f"{hidden['tiles']:,}", equal,
            )  # fmt: skip
    return made


def _timed(records: list[Record]) -> Iterator[tuple[Record, str, dict[str, Any]]]:
    for record in records:
        for mode in _MODES:
            if mode in (record["attention"] or {}):
                yield record, mode, record["attention"][mode]


def _named(record: Record, mode: str) -> list[str | Text]:
    if mode == "training":
        return [Text(_MODES[mode], style="dim"), ""]
    return [record["name"], record["attention"]["backend"]]
