"""The configuration of a bench: problems by kind, and every mistake in it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from flexsparse.choice import BackendName, Pack
from flexsparse.experiment.build import build_rule, build_selector
from flexsparse.experiment.config import Positive, Strict
from flexsparse.experiment.load import judged, refuse_repeated
from flexsparse.experiment.source import Source, dump
from flexsparse.masks.causal import Causal
from flexsparse.measure.attention_peers import PeerName
from flexsparse.measure.baselines import BASELINES, Name
from flexsparse.measure.draws import CLUSTER
from flexsparse.rules import MaskRule
from flexsparse.selectors.base import Selector

Tile = Annotated[int, Field(ge=16)]
Share = Annotated[float, Field(gt=0, lt=1)]


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


class Tail(Strict):
    """A share of the rows that keeps a share of all that is kept."""

    rows: Share = 0.01
    share: Share = 0.3


class Blocks(Heads):
    """Block top-k: ``keep`` blocks of ``kv_block`` keys for each ``q_block`` queries and KV
    head, the own block among them, causal inside it or else whole. ``training`` makes lists by column too. With a ``tail`` some rows
    keep many more."""

    length: Positive
    q_block: Positive = 128
    kv_block: Positive = 128
    keep: Positive
    tail: Tail | None = None
    tile: Tile | None = None
    training: bool = True
    causal: bool = True


class Nsa(Heads):
    """Blocks chosen by every token and KV head, causal, as in Native Sparse Attention: ``keep`` blocks
    of ``block`` keys, the first and the own among them; ``shared`` neighbours choose the same."""

    heads: Positive = 64
    kv_heads: Positive = 4
    length: Positive
    block: Positive = 64
    keep: Positive = 16
    shared: Positive = 1
    tile: Tile | None = None
    training: bool = False

    @model_validator(mode="after")
    def _neighbours(self) -> Self:
        if self.block % self.shared or self.length % self.shared:
            raise ValueError(
                f"shared must divide block and length, got {self.shared}, {self.block} and {self.length}"
            )
        return self


class Decode(Heads):
    """One query a sequence: ``keep`` pages of ``page`` keys for each KV head, no rule."""

    batch: Positive = 1
    length: Positive
    page: Positive = 64
    keep: Positive
    tile: Tile | None = None


class Tokens(Heads):
    """Token top-k, causal: ``keep`` keys a query, one list for all heads, drawn evenly from all earlier
    ones; or as many from each of so many ``blocks`` of 128 keys for each 128 queries, their own among them,
    which stand beside, whole."""

    length: Positive
    keep: Positive
    blocks: Positive | None = None
    tile: Tile | None = None
    training: bool = False

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.blocks is not None and (
            self.keep % self.blocks or self.keep > self.blocks * CLUSTER
        ):
            raise ValueError(
                f"keep must be a multiple of blocks, and at most {CLUSTER} a block, got {self.keep} and "
                f"{self.blocks}"
            )
        return self


class RuleAlone(Heads):
    """A rule named as in an experiment; ``dense`` is what it is held against. It is built ahead, or
    where it is ``fresh``, as for documents that change, at every call."""

    of: Any
    length: Positive
    tile: Tile = 128
    dense: Literal["causal", "full"] = "causal"
    fresh: bool = False
    training: bool = False


class Ragged(Heads):
    """Requests of lognormal lengths, end to end, causal each by itself, fresh at every call."""

    total: Positive
    smallest: Positive = 128
    largest: Positive = 65536
    seed: int = 0
    tile: Tile = 128
    training: bool = False

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if not self.smallest <= self.largest <= self.total:
            raise ValueError(
                "smallest, largest and total must not fall, got "
                f"{self.smallest}, {self.largest} and {self.total}"
            )
        return self


class Chosen(Heads):
    """Candidates that a selector, named as in an experiment, finds in normal q and k, causal; finding
    them is not timed."""

    of: Any
    length: Positive
    tile: Tile | None = None
    training: bool = False


class Linear(Heads):
    """Block top-k as above with one budget after the other: does time follow the tiles?"""

    length: Positive
    keeps: Annotated[list[Positive], Field(min_length=3)]
    q_block: Positive = 128
    kv_block: Positive = 128
    tile: Tile | None = None


class Row(Strict):
    """One problem, of one kind. ``attention`` also times attention over it, against dense. With ``ways``
    nothing else is done: the plan's choice, or every way to run the problem, is timed beside what was
    predicted for it.

    ``backend`` and ``pack`` are make_plan's; of several backends each gets a record. ``peers`` are those
    of the configuration, where none are given.
    """

    name: str
    note: str | None = None
    blocks: Blocks | None = None
    nsa: Nsa | None = None
    decode: Decode | None = None
    tokens: Tokens | None = None
    rule: RuleAlone | None = None
    ragged: Ragged | None = None
    selector: Chosen | None = None
    linear: Linear | None = None
    attention: bool = False
    ways: Literal["chosen", "all"] | None = None
    head_dim: Positive | None = None
    backend: BackendName | Annotated[list[BackendName], Field(min_length=1)] | None = None
    pack: Pack | None = None
    peers: list[PeerName] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}"
            )
        if self.ways and (self.attention or self.linear):
            raise ValueError("has ways: leave attention out, and give another kind than linear")
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def of(self) -> Form:
        form: Form = getattr(self, self.kind)
        return form

    def backends(self, usual: BackendName | list[BackendName]) -> list[BackendName]:
        """Those of the row, or of the configuration."""
        asked = usual if self.backend is None else self.backend
        return asked if isinstance(asked, list) else [asked]


Form = Blocks | Nsa | Decode | Tokens | RuleAlone | Ragged | Chosen | Linear
KINDS = ("blocks", "nsa", "decode", "tokens", "rule", "ragged", "selector", "linear")


class Config(Strict):
    """A bench. In each row ``baselines`` stand beside this library's conversion, and where attention is
    timed ``peers`` beside both together; their first call may take ``patience`` seconds. ``checked``
    query rows meet the reference."""

    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$")]
    dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    head_dim: Positive = 128
    seed: int = 0
    baselines: list[Name] = Field(default_factory=lambda: list(BASELINES))
    peers: list[PeerName] = Field(default_factory=list)
    patience: Positive = 120
    checked: Positive = 256
    backend: BackendName | Annotated[list[BackendName], Field(min_length=1)] = "auto"
    rows: Annotated[list[Row], Field(min_length=1)]

    def as_yaml(self) -> str:
        """The whole of it, defaults too; reads back as the same configuration."""
        return dump(self.model_dump(exclude_none=True))


@dataclass(frozen=True)
class Bench:
    """A configuration that holds together, with the rule and the selector of each of its rows; ``file``,
    ``overrides`` and ``rows`` are what it was read from."""

    config: Config
    rules: tuple[MaskRule | None, ...]
    selectors: tuple[Selector | None, ...]
    source: Source
    file: Path | str
    overrides: tuple[str, ...]
    rows: tuple[str, ...]


def load(file: Path | str, overrides: Iterable[str] = (), rows: Iterable[str] = ()) -> Bench:
    """Reads a configuration; one `ConfigError` names all that is wrong, a line each.

    ``rows``: those to run, as `flexsparse.experiment.picked.pick` takes them; none: all.
    """
    overrides, wanted = tuple(overrides), tuple(rows)
    source, config = judged(file, overrides, Config, wanted)
    data = source.data if isinstance(source.data, Mapping) else {}
    listed = data.get("rows")
    given = list(enumerate(listed if type(listed) is list else []))
    rules = [_rule(row, i, source) for i, row in given]
    selectors = [_selector(row, i, source) for i, row in given]
    if config is not None:
        refuse_repeated(listed, source)
    source.raise_noted()
    assert config is not None
    return Bench(config, tuple(rules), tuple(selectors), source, file, overrides, wanted)


def _rule(row: object, i: int, source: Source) -> MaskRule | None:
    """The rule of a row; what is wrong with it is noted."""
    given = row if isinstance(row, dict) else {}
    alone = given.get("rule")
    if isinstance(alone, dict) and alone.get("of") is not None:
        return build_rule(alone["of"], ("rows", i, "rule", "of"), source)
    blocks = given.get("blocks")
    whole = isinstance(blocks, dict) and blocks.get("causal") is False
    return None if whole or "decode" in given else Causal()


def _selector(row: object, i: int, source: Source) -> Selector | None:
    """The selector of a row; what is wrong with it is noted."""
    found = row.get("selector") if isinstance(row, dict) else None
    if not isinstance(found, dict) or found.get("of") is None:
        return None
    return build_selector(found["of"], ("rows", i, "selector", "of"), source)
