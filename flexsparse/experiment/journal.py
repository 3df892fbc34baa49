"""``rows.jsonl``: a whole line for each finished row, on disk before the next row begins."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from flexsparse.errors import ConfigError


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds a line, and returns when it would survive a loss of power."""
    line = json.dumps(record, allow_nan=False) + "\n"
    try:
        with path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; the rows before {record['name']!r} are there: "
            "--resume goes on after them"
        ) from None


def finished(path: Path, names: list[str], sha256: str) -> list[dict[str, Any]]:
    """The rows that an earlier run has left; a last line that was torn off is cut away.

    ``names`` are all rows in their order, ``sha256`` is of the configuration they belong to.
    """
    if not path.is_file():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    rows = [_read(line) for line in lines]
    while rows and rows[-1] is None:
        rows.pop()
    found = []
    for i, row in enumerate(rows):
        if row is None or i >= len(names) or row.get("name") != names[i]:
            raise ConfigError(
                f"{path}:{i + 1}: is not the row {names[i] if i < len(names) else 'of any name'!r} "
                "that stands there in the configuration: run without --resume to start anew"
            )
        if row.get("config") != sha256:
            raise ConfigError(
                f"{path}:{i + 1}: the row {row['name']!r} belongs to the configuration "
                f"{row.get('config')}, not to {sha256}: run without --resume to start anew"
            )
        found.append(row)
    whole = sum(len(line) + 1 for line in lines[: len(rows)])
    if torn or len(rows) < len(lines):
        os.truncate(path, whole)
    return found


def plain(value: Any) -> Any:
    """The value as JSON has it, which knows no infinity and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def write_whole(path: Path, text: str) -> None:
    """The old text or the new, never a part: another file, put in its place."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(f"{text.rstrip()}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
