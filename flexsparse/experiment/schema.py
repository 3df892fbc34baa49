"""The configuration as a JSON schema, for editors that complete and check YAML."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from torch import Tensor

from flexsparse.experiment.build import hints, parameters
from flexsparse.experiment.config import Config
from flexsparse.resolve import Kind, gallery
from flexsparse.rules import MaskRule
from flexsparse.scores import ScoreRule
from flexsparse.selectors.base import Selector

# An import path or a file: my_lab.rules:Name, ./file.py:Name.
_PATH = r"^[^:]+:[^:]+$"


def schema() -> dict[str, Any]:
    """Every key, and every name of the gallery with its arguments."""
    made = Config.model_json_schema()
    parts = made["$defs"]
    parts["rule"] = {"anyOf": [*_named("rule"), *_algebra()]}
    scores = _named("score")
    parts["score"] = {
        "anyOf": [*scores, {"type": "array", "items": {"anyOf": scores}, "minItems": 1}]
    }
    parts["selector"] = {"anyOf": _named("selector")}
    parts["Input"] |= {"minProperties": 1, "maxProperties": 1}
    sample = parts["Input"]["properties"]["sample"]
    sample["anyOf"] = [parts["Sample"]["properties"]["name"], *sample["anyOf"]]
    row = parts["Row"]["properties"]
    made["properties"]["baseline"] |= _or_null("rule")
    for key, part in {"rule": "rule", "select": "selector", "score": "score"}.items():
        row[key] |= _or_null(part)
    positive = {"type": "integer", "minimum": 1}
    made["properties"]["check"]["anyOf"] = [{"type": "boolean"}, positive]
    tile = {"type": "integer", "minimum": 16}
    row["tile"]["anyOf"] = [
        tile, {"type": "array", "items": tile, "minItems": 2, "maxItems": 2}, {"type": "null"}
    ]  # fmt: skip
    row["split"]["anyOf"] = [positive, {"const": False}, {"type": "null"}]
    row["fallback"]["anyOf"] = [
        {"const": "self"},
        {"type": "object", "properties": {"local": positive}, "required": ["local"],
         "additionalProperties": False},
        {"type": "null"},
    ]  # fmt: skip
    return made


def _or_null(part: str) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/$defs/{part}"}, {"type": "null"}]}


def _named(kind: Kind) -> list[dict[str, Any]]:
    known = gallery(kind)
    bare = [name for name, found in known.items() if not _required(found)]
    return [
        {"enum": bare},
        {"type": "string", "pattern": _PATH},
        *(_mapping(name, _arguments(found)) for name, found in known.items()),
        {"type": "object", "patternProperties": {_PATH: {"type": "object"}},
         "additionalProperties": False, "minProperties": 1, "maxProperties": 1},
    ]  # fmt: skip


def _algebra() -> list[dict[str, Any]]:
    rule = {"$ref": "#/$defs/rule"}
    rules = {"type": "array", "items": rule, "minItems": 1}
    return [_mapping("and", rules), _mapping("or", rules), _mapping("not", rule)]


def _mapping(name: str, inner: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": {name: inner}, "required": [name],
        "additionalProperties": False,
    }  # fmt: skip


def _required(found: type) -> list[str]:
    return [name for name, p in parameters(found).items() if p.default is p.empty]


def _arguments(found: type) -> dict[str, Any]:
    types = hints(found)
    return {
        "type": "object",
        "properties": {name: _type(types.get(name)) for name in parameters(found)},
        "required": _required(found),
        "additionalProperties": False,
    }


def _type(hint: Any) -> dict[str, Any]:
    if hint is Tensor:
        return {"type": ["array", "number"]}
    parts = {MaskRule: "rule", ScoreRule: "score", Selector: "selector"}
    if hint in parts:
        return {"$ref": f"#/$defs/{parts[hint]}"}
    if get_origin(hint) is tuple and get_args(hint)[0] in parts:
        return {"type": "array", "items": _type(get_args(hint)[0])}
    if Tensor in (inner := getattr(hint, "__args__", ())):
        return {"anyOf": [_type(one) for one in inner]}
    # A dataclass takes no settings from outside.
    settings = None if is_dataclass(hint) else ConfigDict(arbitrary_types_allowed=True)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=settings)
        return adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        return {}
