"""What attention delivered, beside whom, and that it was right: the tables of rows that time it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from flexsparse.bench.form import Record, add, table
from flexsparse.experiment.table import NOTHING, number

_MODES = {"forward": "", "training": "  and backward"}


def attention_tables(records: list[Record]) -> list[Table]:
    """Those that have lines, the answer first."""
    makers = (_delivered, _beside, _steps, _uneven, _linear, _proof)
    return [made for make in makers if (made := make(records)).row_count]


def _delivered(records: list[Record]) -> Table:
    made = table(
        "Delivered = (dense / total) / promised; total = layout and kernel in one call",
        ["row", "by"],
        [
            "dense ms", "layout ms", "kernel ms", "total ms", "promised", "got", "delivered",
            "= selector x worktable x kernel", "inflation", "error (plain)",
        ],
    )  # fmt: skip
    for record, mode, found in _timed(records):
        attention = record["attention"]
        times, dense, check = found["time_ms"], found["dense"], attention["check"]
        factors = (number(found["factors"][n]) for n in ("selector", "worktable", "kernel"))
        add(
            made, *_named(record, mode), f"{number(dense['ms'])} {dense['by']}",
            *(number(times[part]) for part in ("layout", "kernel", "total")),
            f"{number(found['promised'])}x", f"{number(found['got'])}x", number(found["delivered"]),
            " x ".join(factors), number(attention["inflation"]),
            f"{number(check['error'])} ({number(check['plain_error'])})",
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
    made = table(
        "A decode step: eager, and in a CUDA graph; how many of it the fastest dense one takes",
        ["row", "by", "what"],
        ["eager ms", "wall ms", "graph ms", "dense / it, eager", "in a graph"],
        ["why not"],
    )
    for record in records:
        steps = (record["attention"] or {}).get("steps") or []
        dense = [s["cost"] for s in steps if s["what"].startswith("dense") and s["cost"]]
        peers = [
            {"what": p["name"], "graph": p["forward"].get("graph"), "eager": p["forward"]["total"]}
            for p in record["peers"]
            if "forward" in p
        ]
        best = {
            key: min((c[key] for c in dense if c[key]), default=None)
            for key in ("eager_ms", "graph_ms")
        }
        for i, step in enumerate(steps):
            cost = step["cost"] or {}
            why = step["reason"] or cost.get("no_graph")
            named = [record["name"], record["attention"]["backend"]] if i == 0 else ["", ""]
            times = (cost.get(key) for key in ("eager_ms", "wall_ms", "graph_ms"))
            add(
                made, *named, step["what"], *map(number, times),
                *(_over(best[key], cost.get(key)) for key in best), why or "",
            )  # fmt: skip
        for other in peers if steps else []:
            add(
                made, "", "", other["what"], number(other["eager"]), NOTHING, number(other["graph"]),
                _over(best["eager_ms"], other["eager"]), _over(best["graph_ms"], other["graph"]),
                "its plan inside eager, outside the graph",
            )  # fmt: skip
        if steps:
            made.add_section()
    return made


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
        ["checked", "of budget", "worst", "tiles of NaN", "bits equal"],
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
                f"{check['rows']} {'ok' if check['ok'] else 'WRONG'}", f"{shares[worst]:.0%}", worst,
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
