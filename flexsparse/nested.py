"""Arguments of operations: values inside lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(value: Any) -> list[Any]:
    """All that stands in lists, tuples and values of dicts."""
    if isinstance(value, list | tuple):
        return [leaf for v in value for leaf in leaves(v)]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    return [value]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dicts of changed values."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(v, change) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    return change(value)
