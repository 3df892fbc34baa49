"""Whether a run may go on where an earlier one ended: only if nothing has changed that makes a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexsparse.errors import ConfigError
from flexsparse.experiment.source import parse, shown

_TOLD = 5


def refuse_changes(out: Path, config: str, around: dict[str, Any]) -> None:
    """Compares with what the earlier run left of its configuration (YAML) and environment."""
    before = _earlier(out)
    if before is None:
        return
    now = _leaves({"config": parse(config, "config.yaml").data, "environment": around})
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if not names:
        return
    told = [
        f"{name.removeprefix('config.')} was {shown(before.get(name))}, is {shown(now.get(name))}"
        for name in names[:_TOLD]
    ]
    more = f", and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    raise ConfigError(
        f"{out} cannot be resumed, as its rows would not be of one kind: {'; '.join(told)}{more}. "
        "Change it back, give another --out, or run without --resume to start anew"
    )


def _earlier(out: Path) -> dict[str, Any] | None:
    try:
        config = (out / "config.yaml").read_text(encoding="utf-8")
        around = json.loads((out / "environment.json").read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        raise ConfigError(
            f"{out / 'environment.json'} is not JSON any more: run without --resume to start anew"
        ) from None
    return _leaves({"config": parse(config, str(out / "config.yaml")).data, "environment": around})


def _leaves(value: Any) -> dict[str, Any]:
    return {".".join(at): leaf for at, leaf in _walk(value, ())}


def _walk(value: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _walk(inner, (*at, str(key)))
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            yield from _walk(inner, (*at, str(i)))
    else:
        yield at, value
