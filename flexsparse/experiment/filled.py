"""A configuration with all that it leaves to defaults, and the files it names."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import flexsparse
from flexsparse.errors import ConfigError
from flexsparse.experiment.build import parameters
from flexsparse.resolve import find_file, kind_of, resolve

Named = Callable[[str, Any], Any]

_PACKAGE = Path(flexsparse.__file__).parent.resolve()
_PARTS = ("rule", "select", "score")


def filled(plain: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With every argument that a rule, score or selector leaves to its default."""

    def fill(name: str, given: Any) -> Any:
        found = resolve(name, beside=folder)
        if not isinstance(found, type) and given is None:
            return name
        given = given or {}
        defaults = {n: _as_written(p.default) for n, p in parameters(found).items()}
        arguments = {n: d for n, d in (defaults | given).items() if n in given or _is_plain(d)}
        return {name: arguments} if arguments else name

    return _each_part(plain, fill)


def runnable(plain: dict[str, Any], folder: Path, into: Path | None = None) -> dict[str, Any]:
    """With the names of files as a configuration in ``into`` finds them from wherever it is run; None: in
    any folder."""

    def rename(name: str, given: Any) -> Any:
        where, colon, attribute = name.rpartition(":")
        if where.endswith(".py"):
            name = f"{_found(where, folder, into)}{colon}{attribute}"
        return name if given is None else {name: given}

    made = _each_part(plain, rename)
    for holder, key in _stored(made):
        holder[key] = _found(holder[key], folder, into)
    return made


def digests(plain: dict[str, Any], folder: Path) -> dict[str, str]:
    """The first 16 digits of a hash over each file outside this library that decides a row."""
    paths: dict[str, Path] = {}

    def note(name: str, given: Any) -> Any:
        found = resolve(name, beside=folder)
        module = sys.modules.get(getattr(found, "__module__", None) or type(found).__module__)
        path = Path(getattr(module, "__file__", None) or _PACKAGE).resolve()
        if path.is_file() and _PACKAGE not in path.parents:
            paths[name.rpartition(":")[0]] = path
        return name

    for holder, key in _stored(_each_part(plain, note)):
        try:
            paths[holder[key]] = find_file(holder[key], folder)
        except ConfigError:
            continue  # the inputs will say so, or it is no file
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in paths.items()
    }


def _each_part(plain: dict[str, Any], change: Named) -> dict[str, Any]:
    """A copy in which ``change`` has been to each name and its arguments."""
    rows = [
        {key: _mapped(value, change) if key in _PARTS else value for key, value in row.items()}
        for row in plain["rows"]
    ]
    given = {k: dict(v) if isinstance(v, dict) else v for k, v in plain["input"].items()}
    baseline = _mapped(plain["baseline"], change)
    return plain | {"baseline": baseline, "rows": rows, "input": given}


def _mapped(spec: Any, change: Named) -> Any:
    if spec is None:
        return None
    if isinstance(spec, str):
        return change(spec, None)
    if isinstance(spec, list):
        return [_mapped(part, change) for part in spec]
    ((word, inner),) = spec.items()
    if word in ("and", "or", "not"):
        return {word: _mapped(inner, change)}
    return change(word, inner)


def _stored(plain: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where an input names a file or a folder."""
    given = plain["input"]
    holders = [
        (given, "file"),
        (given.get("model", {}), "text_file"),
        (given.get("model", {}), "name"),
    ]
    return [(holder, key) for holder, key in holders if holder.get(key)]


def _found(name: str, folder: Path, into: Path | None) -> str:
    path = folder / name if (folder / name).exists() else Path(name)
    if not path.exists():
        return name
    return str(path.resolve()) if into is None else os.path.relpath(path.resolve(), into.resolve())


def _as_written(default: Any) -> Any:
    """A value such as a budget is a mapping in a configuration."""
    value = is_dataclass(default) and not isinstance(default, type) and kind_of(default) is None
    return asdict(default) if value else default


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
