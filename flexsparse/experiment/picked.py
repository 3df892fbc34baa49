"""Rows of a configuration that are to run, picked by name, pattern or number; the others are not looked at."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from flexsparse.errors import ConfigError
from flexsparse.experiment.source import Source
from flexsparse.resolve import did_you_mean


def pick(source: Source, wanted: Iterable[str] = ()) -> None:
    """Leaves out of ``source`` the rows that ``wanted`` does not name, and those that an override has
    set to null.

    Each of ``wanted`` is a name, a pattern such as ``NSA*`` or a number from 0, or several of them
    with commas between. A name with a comma in it is one name. Rows stay in the file's order.
    """
    rows = source.data.get("rows") if isinstance(source.data, dict) else None
    if not isinstance(rows, list):
        return
    wanted = list(wanted)
    left = set(range(len(rows))) if not wanted else set()
    for one in wanted:
        left |= _meant(one, rows, source.file)
    gone = {i for i, row in enumerate(rows) if row is None and ("rows", i) in source.changes}
    kept = sorted(left - gone)
    if not kept and rows:
        raise ConfigError(f"{source.file}: no row is left to run: all were set to null")
    if len(kept) < len(rows):
        source.data["rows"] = [rows[i] for i in kept]
        source.left = kept


def named_with_changes(name: str, source: Source, row: int) -> str:
    """A row's name, which an override may have made untrue, with what was overridden.

    ``row`` counts those that run.
    """
    number = row if source.left is None else source.left[row]
    changed = {at[2:]: said for at, said in source.changes.items() if at[:2] == ("rows", number)}
    if not changed or () in changed or ("name",) in changed:
        return name
    told = (f"{'.'.join(map(str, at))}={said}" for at, said in changed.items())
    return f"{name} [{', '.join(told)}]"


def _meant(one: str, rows: list[Any], file: str) -> set[int]:
    found = _matching(one, rows)
    parts = [part.strip() for part in one.split(",")]
    if not found and len(parts) > 1:
        return set().union(*(_meant(part, rows, file) for part in parts))
    if not found:
        names = _names(rows)
        listed = ", ".join(f"{i} {name!r}" for i, name in enumerate(names) if rows[i] is not None)
        raise ConfigError(
            f"--rows: {file} has no row {one!r}{did_you_mean(one, names)}; it has {listed}"
        )
    return found


def _matching(one: str, rows: list[Any]) -> set[int]:
    names = _names(rows)
    if one in names:
        return {i for i, name in enumerate(names) if name == one}
    if one.isdecimal() and int(one) < len(rows):
        return {int(one)}
    return {i for i, name in enumerate(names) if fnmatchcase(name, one)}


def _names(rows: list[Any]) -> list[str]:
    return [str(row.get("name", "")) if isinstance(row, dict) else "" for row in rows]
