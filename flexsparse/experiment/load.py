"""A file and its overrides to an experiment that holds together, or to every mistake at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from flexsparse.experiment.build import build_rule, build_score, build_selector
from flexsparse.experiment.config import Config, Row
from flexsparse.experiment.filled import digests, filled, runnable
from flexsparse.experiment.picked import pick
from flexsparse.experiment.source import At, Source, dump, read, shown
from flexsparse.experiment.wording import worded
from flexsparse.masks.causal import Causal
from flexsparse.resolve import did_you_mean
from flexsparse.rules import MaskRule
from flexsparse.scores import ScoreRule
from flexsparse.selectors.base import Selector

# What is said of a key that must be given, by how deep it stands.
_MEANT = {
    (1, "name"): ": the experiment needs one, as it names the folder of results",
    (1, "rows"): ": give a list, such as [{name: window, rule: {sliding_window: {size: 64}}}]",
    (3, "name"): ": every row needs one of its own",
}


Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Case:
    """A row with its objects."""

    row: Row
    rule: MaskRule | None
    select: Selector | None
    score: ScoreRule | None


@dataclass(frozen=True)
class Experiment:
    """A configuration that holds together, with the objects its names stand for."""

    config: Config
    baseline: MaskRule | None
    cases: tuple[Case, ...]
    source: Source

    @cached_property
    def plain(self) -> dict[str, Any]:
        """Every value, all defaults filled, as YAML has them; names of files as they were written."""
        return filled(self.config.plain(), self.source.folder)

    @cached_property
    def files(self) -> dict[str, str]:
        """The first 16 digits of a hash over each file that the configuration names."""
        return digests(self.plain, self.source.folder)

    @cached_property
    def sha256(self) -> str:
        """The first 16 digits of a hash over every value, and over the files it names."""
        text = json.dumps([self.plain, self.files], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_yaml(self, into: Path | None = None) -> str:
        """The configuration as it runs; it reads back as the same one if it stands in ``into``, or, None,
        anywhere, whatever the current folder."""
        return dump(runnable(self.plain, self.source.folder, into))


def load(file: Path | str, overrides: Iterable[str] = (), rows: Iterable[str] = ()) -> Experiment:
    """Reads a configuration; one `ConfigError` names all that is wrong, a line each.

    ``rows``: those to run, as `flexsparse.experiment.picked.pick` takes them; none: all.
    """
    source, config = judged(file, overrides, Config, rows)
    data = source.data if isinstance(source.data, Mapping) else {}
    baseline = None
    if (spec := data.get("baseline", "causal")) is not None:
        baseline = build_rule(spec, ("baseline",), source)
    given = data.get("rows")
    listed = given if type(given) is list else []
    objects = [_objects(row, i, source) for i, row in enumerate(listed)]
    refuse_repeated(given, source)
    if config is not None and config.perplexity:
        _refuse_no_language(config, baseline, source)
    source.raise_noted()
    assert config is not None
    cases = (Case(row, *found) for row, found in zip(config.rows, objects, strict=True))
    return Experiment(config, baseline, tuple(cases), source)


def _objects(
    row: object, i: int, source: Source
) -> tuple[MaskRule | None, Selector | None, ScoreRule | None]:
    given = row if isinstance(row, dict) else {}
    at: At = ("rows", i)
    rule, select, score = (given.get(key) for key in ("rule", "select", "score"))
    return (
        None if rule is None else build_rule(rule, (*at, "rule"), source),
        None if select is None else build_selector(select, (*at, "select"), source),
        None if score is None else build_score(score, (*at, "score"), source),
    )


def _refuse_no_language(config: Config, baseline: MaskRule | None, source: Source) -> None:
    """Notes what keeps a perplexity from being that of a language model with the row's attention."""
    if config.input.model is None:
        form = "{model: {name: smollm2, layer: 17}}"
        source.note(("perplexity",), f"is one of a whole model: give an input such as {form}")
    if not isinstance(baseline, Causal):
        source.note(("baseline",), "must be causal beside a perplexity: a language model's own is")
    for i, row in enumerate(config.rows):
        if row.q_offset is not None:
            said = "has no meaning in a whole model: leave it out, or set perplexity: false"
            source.note(("rows", i, "q_offset"), said)


def judged(
    file: Path | str, overrides: Iterable[str], model: type[Model], rows: Iterable[str] = ()
) -> tuple[Source, Model | None]:
    """A file with its overrides and the ``rows`` that are to run, and as ``model`` has it; what is
    wrong with it is noted."""
    source = read(file)
    for argument in overrides:
        source.override(argument)
    pick(source, rows)
    try:
        return source, model.model_validate(source.data)
    except ValidationError as error:
        for one in error.errors():
            source.note(*told(one, model))
    return source, None


def refuse_repeated(rows: object, source: Source) -> None:
    seen: set[str] = set()
    for i, row in enumerate(rows if isinstance(rows, list) else []):
        name = row.get("name") if isinstance(row, dict) else None
        if isinstance(name, str) and name in seen:
            source.note(
                ("rows", i, "name"), f"two rows are named {name!r}: a row's name must be its own"
            )
        seen.add(str(name))


def told(error: Mapping[str, Any], root: type[BaseModel]) -> tuple[At, str]:
    """The validator's error as a place and a sentence in the words of the file."""
    at: At = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        known = keys(at[:-1], root)
        return at, f"unknown key{did_you_mean(str(at[-1]), known)}; known are {', '.join(known)}"
    if error["type"] == "missing":
        return at[:-1], f"{at[-1]} is missing{_MEANT.get((len(at), str(at[-1])), '')}"
    if error["type"] == "model_type":
        given = error["input"]
        said = "the file is empty" if given is None and not at else f"got {shown(given)}"
        return at, f"must be a mapping with {', '.join(keys(at, root))}; {said}"
    if error["type"] == "value_error":
        return at, str(error["ctx"]["error"])
    return at, worded([error])


def keys(at: At, root: type[BaseModel] = Config) -> list[str]:
    """The keys that the mapping at this place may have."""
    model: Any = root
    for part in at:
        if isinstance(part, str):
            model = model.model_fields[part].annotation
            while not isinstance(model, type) or not issubclass(model, BaseModel):
                model = next(a for a in get_args(model) if a is not type(None))
    return list(model.model_fields)
