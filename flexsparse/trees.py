"""Layouts, selections and grids as trees of tensors: what torch.export and torch.func look into."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

T = TypeVar("T")


@dataclass(frozen=True)
class _Rest:
    """The fields that hold no tensor; two are equal when they hold the same."""

    names: tuple[str, ...]
    others: tuple[tuple[str, Any], ...]


def register(kind: type[T]) -> type[T]:
    """Makes a frozen dataclass a node whose children are its tensors, and what holds tensors."""

    def holds_tensors(value: Any) -> bool:
        if isinstance(value, tuple):
            return any(holds_tensors(part) for part in value)
        return isinstance(value, Tensor | list) or type(value) in _KINDS

    def flatten(made: Any) -> tuple[list[Any], _Rest]:
        parts = {f.name: getattr(made, f.name) for f in fields(kind)}  # type: ignore[arg-type]
        names = tuple(name for name, value in parts.items() if holds_tensors(value))
        others = tuple((name, value) for name, value in parts.items() if name not in names)
        return [parts[name] for name in names], _Rest(names, others)

    def flatten_with_keys(made: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        children, rest = flatten(made)
        return [(GetAttrKey(n), c) for n, c in zip(rest.names, children, strict=True)], rest

    def unflatten(children: Any, rest: _Rest) -> Any:
        # Not by __init__, which judges a user's values: children may be anything here.
        made = object.__new__(kind)
        for name, value in (*zip(rest.names, children, strict=True), *rest.others):
            object.__setattr__(made, name, value)
        return made

    _KINDS.add(kind)
    register_pytree_node(
        kind,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__name__}",
    )
    return kind


_KINDS: set[type[Any]] = set()
