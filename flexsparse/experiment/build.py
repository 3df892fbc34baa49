"""What a configuration writes to rules, scores and selectors.

    causal                                              a name alone
    {sliding_window: {size: 128}}                       a name with arguments
    {"./mine.py:Banded": {width: 4}}                    the same from a file
    {and: [causal, {or: [{not: …}, …]}]}                the algebra of rules
    [{softcap: {cap: 30.0}}, …]                         scores, one after the other
    {per_head: {rules: [causal, {sliding_window: …}]}}  rules inside a rule, written like any other

A list becomes a tensor where the argument is one. A file is looked for beside the configuration,
then in the current folder.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial, reduce
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from flexsparse.errors import ConfigError, FlexSparseError
from flexsparse.experiment.source import At, Source, shown
from flexsparse.experiment.wording import worded
from flexsparse.resolve import Kind, did_you_mean, kind_of, resolve
from flexsparse.rules import MaskRule, as_rule
from flexsparse.scores import ScoreRule, as_score
from flexsparse.selectors.base import Selector

T = TypeVar("T")

_JOINED = "; rules are joined by {and: [rule, …]}, {or: [rule, …]} and {not: rule}"


def build_rule(spec: object, at: At, source: Source) -> MaskRule | None:
    """The rule, or None with a note of what is wrong with it."""
    if isinstance(spec, dict) and len(spec) == 1:
        word, inner = next(iter(spec.items()))
        if word == "not":
            rule = build_rule(inner, (*at, word), source)
            return None if rule is None else ~rule
        if word in ("and", "or"):
            if not isinstance(inner, list) or not inner:
                source.note((*at, word), f"must be a list of rules, got {shown(inner)}")
                return None
            rules = [build_rule(part, (*at, word, i), source) for i, part in enumerate(inner)]
            whole = [rule for rule in rules if rule is not None]
            join = operator.and_ if word == "and" else operator.or_
            return reduce(join, whole) if len(whole) == len(rules) else None
    return _judged(build_part(spec, "rule", at, source), as_rule, at, source)


def build_score(spec: object, at: At, source: Source) -> ScoreRule | None:
    """The score, or None with a note of what is wrong with it."""
    if isinstance(spec, list) and spec:
        scores = [build_score(part, (*at, i), source) for i, part in enumerate(spec)]
        whole = [score for score in scores if score is not None]
        return reduce(operator.rshift, whole) if len(whole) == len(scores) else None
    return _judged(build_part(spec, "score", at, source), as_score, at, source)


def build_selector(spec: object, at: At, source: Source) -> Selector | None:
    """The selector, or None with a note of what is wrong with it."""
    made = build_part(spec, "selector", at, source)
    if made is None or isinstance(made, Selector):
        return made
    source.note(at, f"must be a Selector, got {type(made).__name__}")
    return None


def build_part(spec: object, kind: Kind | None, at: At, source: Source) -> Any:
    """The one object of a name, with its arguments if it has some."""
    arguments: object = None
    name = spec
    if isinstance(spec, dict) and len(spec) == 1:
        name, arguments = next(iter(spec.items()))
        at = (*at, name)
    what = kind or "rule, score or selector"
    if isinstance(spec, dict) and len(spec) > 1:
        first, *_, last = spec
        form = f"{{{first}: {{argument: value}}}}"
        said = f"stands beside {first}, but a {what} has one name, and its arguments below: {form}"
        source.note((*at, last), said + (_JOINED if kind == "rule" else ""))
        return None
    if not isinstance(name, str):
        said = f"must be the name of a {what}, or {{name: {{argument: value}}}}, got {shown(spec)}"
        source.note(at, said + (_JOINED if kind == "rule" else ""))
        return None
    try:
        found = resolve(name, kind, source.folder)
    except ConfigError as error:
        source.note(at, _meant(name, kind) or str(error))
        return None
    if arguments is None and not isinstance(found, type):
        return found
    if arguments is not None and not isinstance(arguments, dict):
        first = next(iter(parameters(found)), "argument")
        form = f"{{{name}: {{{first}: {shown(arguments)}}}}}"
        source.note(at, f"arguments have names: write {form}, not {{{name}: {shown(arguments)}}}")
        return None
    return _called(found, name, arguments or {}, at, source)


def _called(found: Any, name: str, arguments: dict[str, Any], at: At, source: Source) -> Any:
    if not callable(found) or (kind_of(found) is not None and not isinstance(found, type)):
        source.note(at, f"{name} takes no arguments: it is used as it is")
        return None
    takes = parameters(found)
    named = {n: p for n, p in takes.items() if p.kind is not p.VAR_KEYWORD}
    types = hints(found)
    clean, right = {}, True
    for key, value in arguments.items():
        if key not in named and len(named) == len(takes):
            listed = f"it takes {', '.join(named)}" if named else "it takes none"
            source.note(
                (*at, key), f"{name} has no argument {key!r}{did_you_mean(key, named)}; {listed}"
            )
            right = False
            continue
        if (build := _builder(types.get(key))) is not None:
            if (part := build(value, (*at, key), source)) is None:
                right = False
            else:
                clean[key] = part
            continue
        try:
            clean[key] = _typed(value, types.get(key))
        except (ValueError, FlexSparseError) as error:
            source.note((*at, key), str(error))
            right = False
    needed = [n for n, p in named.items() if p.default is p.empty and n not in arguments]
    if needed:
        first = needed[0]
        source.note(
            at,
            f"{name} needs {' and '.join(needed)}: give it as {{{name}: {{{first}: …}}}}, or on the "
            f"command line as {first}=…",
        )
    wrong_needed = any(p.default is p.empty and n not in clean for n, p in named.items())
    if needed or (not right and wrong_needed):
        return None
    try:
        # Also beside a mistake, so that what the class itself refuses is told with it.
        made = found(**clean)
        return made if right else None
    except FlexSparseError as error:
        said = str(error)
    except Exception as error:
        said = f"{name} raised {type(error).__name__}: {error}"
    # The place of the argument that the sentence speaks of, if it speaks of one.
    meant = [key for key in clean if re.search(rf"\b{re.escape(key)}\b", said)]
    source.note((*at, meant[0]) if len(meant) == 1 else at, said)
    return None


def _meant(name: str, kind: Kind | None) -> str | None:
    """What to write for a name that a newcomer gives to something else."""
    said = f"no {kind} is named {name!r}: "
    if name.lower() in ("none", "full", "dense"):
        return f"{said}write null for no {kind}"
    if re.search(r"[&|~()]", name) and ":" not in name:
        form = "a name stands alone, and its arguments beside it, {name: {argument: value}}"
        return f"{said}{form}{_JOINED}"
    return None


def _builder(hint: Any) -> Callable[[Any, At, Source], Any] | None:
    """How an argument is built that is itself a rule, a score or a selector, or a tuple of them."""
    one: list[tuple[type, Callable[[Any, At, Source], Any]]] = [
        (MaskRule, build_rule), (ScoreRule, build_score), (Selector, build_selector)
    ]  # fmt: skip
    inner = get_args(hint)
    for kind, build in one:
        if hint is kind:
            return build
        if get_origin(hint) is tuple and inner[0] is kind:
            return partial(_each, build)
    return None


def _each(
    build: Callable[[Any, At, Source], Any], value: Any, at: At, source: Source
) -> tuple[Any, ...] | None:
    if not isinstance(value, list):
        source.note(at, f"must be a list, got {shown(value)}")
        return None
    made = tuple(build(part, (*at, i), source) for i, part in enumerate(value))
    return None if any(part is None for part in made) else made


def parameters(found: Any) -> Mapping[str, inspect.Parameter]:
    """What a class or function takes, by name; nothing where Python itself cannot tell."""
    try:
        if isinstance(found, type) and is_dataclass(found):
            # A class that inherits its fields would show the __new__ that stands before them.
            _, *taken = inspect.signature(found.__init__).parameters.items()
            return dict(taken)
        return inspect.signature(found).parameters
    except (TypeError, ValueError):
        return {}


def hints(found: Any) -> dict[str, Any]:
    """The types of what a class or function takes, as far as they can be read."""
    try:
        return get_type_hints(found)
    except Exception:  # a hint that only a type checker can read
        return {}


def _typed(value: Any, hint: Any) -> Any:
    """The value as the argument's type wants it: a list becomes a tensor where one is wanted."""
    if hint is None:
        return value
    wants_tensor = hint is Tensor or Tensor in getattr(hint, "__args__", ())
    if isinstance(value, list) and wants_tensor:
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"must be numbers that make a tensor, got {shown(value)}: {error}"
            ) from None
    try:
        judge: TypeAdapter[Any] = TypeAdapter(
            hint,
            config=ConfigDict(
                arbitrary_types_allowed=True, strict=not isinstance(value, list | dict)
            ),
        )
    except Exception:  # a type that pydantic cannot judge is left to the class itself
        return value
    try:
        return judge.validate_python(value)
    except ValidationError as error:
        raise ValueError(worded(error.errors())) from None


def _judged(made: object, judge: Callable[[object], T | None], at: At, source: Source) -> T | None:
    if made is None:
        return None
    try:
        return judge(made)
    except FlexSparseError as error:
        source.note(at, str(error))
        return None
