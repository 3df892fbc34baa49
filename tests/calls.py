"""Calls to try: rules, scores, selections and lengths, drawn from a few kinds and many values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import (
    Alibi,
    AttentionSink,
    Causal,
    Document,
    HeadBias,
    PrefixLM,
    RightPadding,
    SlidingWindow,
    Softcap,
)

LENGTHS = (1, 7, 63, 64, 65, 200)
GROUPS = (1, 3, 4, 9)


@dataclass(frozen=True)
class Call:
    """One call, as plain values: what is drawn stays readable in a failure."""

    rule: str = "causal"
    score: str = "none"
    q_len: int = 64
    kv_len: int = 64
    batch: int = 1
    kv_heads: int = 2
    group: int = 3
    sharing: str = "none"
    q_block: int = 1
    kv_block: int = 1
    width: int = 5
    dtype: torch.dtype = torch.float32
    head_dim: int = 16
    tile: tuple[int, int] | None = None
    pack: str | None = None
    split: int | None = None
    cluster: bool | None = None
    fallback: Any = None
    sink: bool = False
    offset: str = "default"
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def tensors(call: Call, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """q, k, v, and the keywords of the call."""
    draw = torch.Generator().manual_seed(call.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, call.dtype)

    q = normal(call.batch, call.heads, call.q_len, call.head_dim)
    k = normal(call.batch, call.kv_heads, call.kv_len, call.head_dim)
    v = normal(call.batch, call.kv_heads, call.kv_len, call.head_dim)
    options: dict[str, Any] = {
        "rule": RULES[call.rule](call, draw, device),
        "score": SCORES[call.score](call, draw, device),
        "select": selection(call, draw, device),
        "fallback": call.fallback,
        "tile": call.tile,
        "pack": call.pack,
    }
    options |= {
        name: value
        for name, value in (("split", call.split), ("cluster", call.cluster))
        if value is not None
    }
    if call.offset == "each":
        options["q_offset"] = torch.randint(-3, call.kv_len, (call.batch,), generator=draw).to(
            device
        )
    elif call.offset != "default":
        options["q_offset"] = int(call.offset)
    if call.sink:
        options["sink"] = torch.randn(call.heads, generator=draw).to(device).requires_grad_()
    return (q, k, v), options


def selection(call: Call, draw: torch.Generator, device: torch.device) -> fs.Selection | None:
    """Unsorted, with repeats, holes, an empty row, and wider than the keys where they are few."""
    if call.sharing == "none":
        return None
    heads = {"shared": 1, "kv": call.kv_heads, "query": call.heads}[call.sharing]
    rows, blocks = -(-call.q_len // call.q_block), -(-call.kv_len // call.kv_block)
    shape = (call.batch, heads, rows, call.width)
    indices = torch.randint(-1, blocks, shape, generator=draw)
    indices[:, -1, rows // 2] = -1
    if call.seed % 2:
        indices = indices.to(torch.int32)
    return fs.Selection.from_indices(
        indices.to(device),
        q_len=call.q_len,
        kv_len=call.kv_len,
        q_block=call.q_block,
        kv_block=call.kv_block,
    )


Make = Callable[[Call, torch.Generator, torch.device], Any]


def _lengths(call: Call, draw: torch.Generator, device: torch.device) -> Tensor:
    return torch.randint(0, call.kv_len + 1, (call.batch,), generator=draw).to(device)


def _documents(call: Call, draw: torch.Generator, device: torch.device) -> Tensor:
    ids = torch.randint(0, 4, (call.batch, call.kv_len), generator=draw).sort(-1).values
    ids[:, -(call.kv_len // 10) :] = -1 if call.kv_len >= 10 else ids[:, -1:]
    return ids.to(device)


def _table(call: Call, draw: torch.Generator, device: torch.device) -> fs.MaskRule:
    table = (torch.rand(call.heads, call.kv_len, generator=draw) > 0.4).to(device)
    return fs.MaskRule.of(lambda b, h, q, kv: table[h, kv])


RULES: dict[str, Make] = {
    "none": lambda c, g, d: None,
    "causal": lambda c, g, d: Causal(),
    "streaming": lambda c, g, d: Causal() & (SlidingWindow(2 + c.seed % 50) | AttentionSink(1 + c.seed % 4)),
    "padding": lambda c, g, d: fs.MaskRule.of(_kept(_lengths(c, g, d))),
    "prefix": lambda c, g, d: PrefixLM(_lengths(c, g, d)),
    "heads": _table,
    "band": lambda c, g, d: fs.MaskRule.of(lambda b, h, q, kv: ((q - kv).abs() % (h + 2) == 0) | (kv // 8 == q // 8)),
}  # fmt: skip

# These read tables at the query's position, so they need queries that stand among the keys.
SQUARE_RULES: dict[str, Make] = {
    "document": lambda c, g, d: Causal() & Document(_documents(c, g, d)),
    "ragged": lambda c, g, d: Causal() & RightPadding(_lengths(c, g, d)),
}
RULES |= SQUARE_RULES


def _kept(lengths: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: kv < lengths[b]


def _alibi(call: Call, draw: torch.Generator, device: torch.device) -> fs.ScoreRule:
    return Alibi(torch.rand(call.heads, generator=draw).to(device).requires_grad_())


def _bias(call: Call, draw: torch.Generator, device: torch.device) -> fs.ScoreRule:
    return HeadBias(torch.randn(call.heads, 11, generator=draw).to(device).requires_grad_())


def _temperature(call: Call, draw: torch.Generator, device: torch.device) -> fs.ScoreRule:
    warm = (0.5 + torch.rand((), generator=draw)).to(device).requires_grad_()
    return fs.ScoreRule.of(lambda s, b, h, q, kv: s * warm)


SCORES: dict[str, Make] = {
    "none": lambda c, g, d: None,
    "alibi": _alibi,
    "softcap": lambda c, g, d: Softcap(1.0 + c.seed % 7),
    "bias": _bias,
    "capped alibi": lambda c, g, d: _alibi(c, g, d) >> Softcap(2.0 + c.seed % 5),
    "temperature": _temperature,
}
