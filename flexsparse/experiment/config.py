"""The configuration of an experiment: what may be written, and every mistake in it at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from flexsparse.arguments import Fallback, check_fallback, tile_size
from flexsparse.choice import BackendName
from flexsparse.errors import FlexSparseError
from flexsparse.experiment.build import build_rule, build_score, build_selector
from flexsparse.experiment.source import At, Source, dump, read
from flexsparse.resolve import did_you_mean
from flexsparse.rules import MaskRule
from flexsparse.scores import ScoreRule
from flexsparse.selectors.base import Selector

Positive = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RandomInput(Strict):
    """Normal numbers: ``q [batch, heads, q_len, head_dim]``; what is left out is as for q."""

    batch: Positive = 1
    heads: Positive
    kv_heads: Positive | None = None
    q_len: Positive
    kv_len: Positive | None = None
    head_dim: Positive = 64

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        return self


class Input(Strict):
    """Where q, k and v come from: one of the three."""

    sample: Literal["smollm2"] | None = None
    file: str | None = None
    random: RandomInput | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of sample, file and random, got {' and '.join(given) or 'none'}"
            )
        return self


def _check(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError(
        f"must be true, false, or how many query rows to check, at least 1, got {value!r}"
    )


def _tile(value: object) -> object:
    try:
        return value if value is None else as_tile(value) and value
    except FlexSparseError as error:
        # Not all of them are ValueErrors, which is what pydantic takes.
        raise ValueError(str(error)) from None


def as_tile(value: Any) -> tuple[int, int] | None:
    """``n`` or ``[query, key]`` as the library takes it."""
    return None if value is None else tile_size(tuple(value) if isinstance(value, list) else value)


def _fallback(value: object) -> object:
    try:
        check_fallback(as_fallback(value))
    except FlexSparseError:
        raise ValueError(f"must be self or {{local: n}} with n >= 1, got {value!r}") from None
    return value


def as_fallback(value: Any) -> Fallback:
    """``self`` or ``{local: n}`` as the library takes it."""
    return ("local", value["local"]) if isinstance(value, dict) and [*value] == ["local"] else value


class Row(Strict):
    """One line of the table; what is left out is as in `flexsparse.attention`."""

    name: str
    rule: Any = None
    select: Any = None
    score: Any = None
    backend: BackendName = "auto"
    tile: Annotated[Any, AfterValidator(_tile)] = None
    q_offset: int | None = None
    fallback: Annotated[Any, AfterValidator(_fallback)] = None


class Config(Strict):
    """An experiment. ``baseline`` is the dense attention that rows are held against, and ``check``
    how many query rows meet the reference: true for all."""

    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$")]
    input: Input = Input(sample="smollm2")
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    check: Annotated[Any, AfterValidator(_check)] = True
    baseline: Any = "causal"
    seed: int = 0
    repeats: Positive = 5
    rows: Annotated[list[Row], Field(min_length=1)]

    def as_yaml(self) -> str:
        """The whole of it, defaults too; reads back as the same configuration."""
        return dump(self._plain())

    @property
    def sha256(self) -> str:
        """The first 16 digits of a hash over every value."""
        text = json.dumps(self._plain(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _plain(self) -> dict[str, Any]:
        plain = self.model_dump()
        plain["input"] = self.input.model_dump(exclude_none=True)
        plain["rows"] = [row.model_dump(exclude_none=True) for row in self.rows]
        return plain


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


def load(file: Path | str, overrides: Iterable[str] = ()) -> Experiment:
    """Reads a configuration; one `ConfigError` names all that is wrong, a line each."""
    source = read(file)
    for argument in overrides:
        source.override(argument)
    config = None
    try:
        config = Config.model_validate(source.data)
    except ValidationError as error:
        for one in error.errors():
            source.note(*told(one, Config))
    data = source.data if isinstance(source.data, Mapping) else {}
    baseline = None
    if (spec := data.get("baseline", "causal")) is not None:
        baseline = build_rule(spec, ("baseline",), source.note)
    rows = data.get("rows")
    objects = [_objects(row, i, source) for i, row in enumerate(rows if type(rows) is list else [])]
    _refuse_repeated(rows, source)
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
        None if rule is None else build_rule(rule, (*at, "rule"), source.note),
        None if select is None else build_selector(select, (*at, "select"), source.note),
        None if score is None else build_score(score, (*at, "score"), source.note),
    )


def _refuse_repeated(rows: object, source: Source) -> None:
    seen: set[str] = set()
    for i, row in enumerate(rows if isinstance(rows, list) else []):
        name = row.get("name") if isinstance(row, dict) else None
        if isinstance(name, str) and name in seen:
            source.note(("rows", i, "name"), f"two rows are named {name!r}")
        seen.add(str(name))


def told(error: Mapping[str, Any], root: type[BaseModel]) -> tuple[At, str]:
    """pydantic's error as a place and a sentence in the words of the file."""
    at: At = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        known = _keys(at[:-1], root)
        return at, f"unknown key{did_you_mean(str(at[-1]), known)}; known are {', '.join(known)}"
    if error["type"] == "missing":
        return at, "is missing"
    if error["type"] == "model_type":
        return at, f"must be a mapping with {', '.join(_keys(at, root))}, got {error['input']!r}"
    if error["type"] == "value_error":
        return at, str(error["ctx"]["error"])
    said = str(error["msg"]).replace("Input should be", "must be").replace("List should", "must")
    return at, f"{said}, got {error['input']!r}"


def _keys(at: At, root: type[BaseModel]) -> list[str]:
    """The keys that the mapping at this place may have."""
    model: Any = root
    for part in at:
        if isinstance(part, str):
            model = model.model_fields[part].annotation
            while not isinstance(model, type) or not issubclass(model, BaseModel):
                model = next(a for a in get_args(model) if a is not type(None))
    return list(model.model_fields)
