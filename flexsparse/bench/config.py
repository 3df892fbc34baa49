"""The configuration of a bench: problems by kind, and every mistake in it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from flexsparse.experiment.build import build_rule
from flexsparse.experiment.config import Positive, Strict
from flexsparse.experiment.load import judged, refuse_repeated
from flexsparse.experiment.source import Source, dump
from flexsparse.masks.causal import Causal
from flexsparse.measure.baselines import BASELINES, Name
from flexsparse.rules import MaskRule

Tile = Annotated[int, Field(ge=16)]


class Heads(Strict):
    """Query heads, and KV heads that divide them."""

    heads: Positive = 32
    kv_heads: Positive = 8

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        return self


class Blocks(Heads):
    """Block top-k, causal: ``keep`` blocks of ``kv_block`` keys for each ``q_block`` queries and KV
    head, the own block among them. ``training`` makes lists by column too."""

    length: Positive
    q_block: Positive = 128
    kv_block: Positive = 128
    keep: Positive
    tile: Tile | None = None
    training: bool = True


class Decode(Heads):
    """One query a sequence: ``keep`` pages of ``page`` keys for each KV head, no rule."""

    batch: Positive = 1
    length: Positive
    page: Positive = 64
    keep: Positive
    tile: Tile | None = None


class Tokens(Heads):
    """Token top-k, causal: ``keep`` keys a query, one list for all heads, drawn evenly."""

    length: Positive
    keep: Positive
    tile: Tile | None = None


class RuleAlone(Heads):
    """A rule named as in an experiment, built ahead; ``dense`` is what it is held against."""

    of: Any
    length: Positive
    tile: Tile = 128
    dense: Literal["causal", "full"] = "causal"


class Row(Strict):
    """One problem, of one kind. ``attention`` also times attention over it, against dense."""

    name: str
    blocks: Blocks | None = None
    decode: Decode | None = None
    tokens: Tokens | None = None
    rule: RuleAlone | None = None
    attention: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}"
            )
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


KINDS = ("blocks", "decode", "tokens", "rule")


class Config(Strict):
    """A bench; ``baselines`` names what stands beside this library in each row."""

    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$")]
    dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    head_dim: Positive = 128
    seed: int = 0
    baselines: list[Name] = Field(default_factory=lambda: list(BASELINES))
    rows: Annotated[list[Row], Field(min_length=1)]

    def as_yaml(self) -> str:
        """The whole of it, defaults too; reads back as the same configuration."""
        return dump(self.model_dump(exclude_none=True))


@dataclass(frozen=True)
class Bench:
    """A configuration that holds together, with the rule of each of its rows."""

    config: Config
    rules: tuple[MaskRule | None, ...]
    source: Source


def load(file: Path | str, overrides: Iterable[str] = ()) -> Bench:
    """Reads a configuration; one `ConfigError` names all that is wrong, a line each."""
    source, config = judged(file, overrides, Config)
    data = source.data if isinstance(source.data, Mapping) else {}
    rows = data.get("rows")
    rules = [_rule(row, i, source) for i, row in enumerate(rows if type(rows) is list else [])]
    if config is not None:
        refuse_repeated(rows, source)
    source.raise_noted()
    assert config is not None
    return Bench(config, tuple(rules), source)


def _rule(row: object, i: int, source: Source) -> MaskRule | None:
    """The rule of a row; what is wrong with it is noted."""
    given = row if isinstance(row, dict) else {}
    alone = given.get("rule")
    if isinstance(alone, dict) and alone.get("of") is not None:
        return build_rule(alone["of"], ("rows", i, "rule", "of"), source)
    return None if "decode" in given else Causal()
