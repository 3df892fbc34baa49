"""What is wrong with a value, in this library's words instead of the validator's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flexsparse.experiment.source import shown
from flexsparse.resolve import did_you_mean

_MUST_BE = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "a smaller integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a mapping",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
    "too_short": ("min_length", "a list of at least {}"),
    "too_long": ("max_length", "a list of at most {}"),
}


def worded(errors: Iterable[Mapping[str, Any]]) -> str:
    """One sentence for a value and what the validator says of it; several are its alternatives.

    >>> worded([{"type": "int_type", "input": None}])
    'must be an integer, got null'
    """
    told = list(errors)
    parts = dict.fromkeys(_wanted(error) for error in told)
    return f"must be {' or '.join(parts)}, got {shown(told[0]['input'])}{_near(told[0])}"


def _wanted(error: Mapping[str, Any]) -> str:
    kind, more = error["type"], error.get("ctx", {})
    if kind in _MUST_BE:
        return _MUST_BE[kind]
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return words.format(more[key])
    if kind == "literal_error":
        return str(more["expected"]).replace("'", "")
    if kind in ("dataclass_type", "dataclass_exact_type"):
        return f"a mapping for {more['class_name']}"
    if kind in ("missing", "unexpected_keyword_argument"):
        return f"a mapping with{'out' * (kind != 'missing')} {error['loc'][-1]}"
    if kind == "is_instance_of":
        return "a list of numbers" if more["class"] == "Tensor" else f"a {more['class']}"
    return "what its type says"


def _near(error: Mapping[str, Any]) -> str:
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    known = str(error["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
    return did_you_mean(error["input"], known)
