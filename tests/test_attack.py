"""Inputs nobody thought of."""

from __future__ import annotations

import copy
import enum
import importlib
import math
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexsparse as fs
from flexsparse.masks import (
    Alibi,
    AttentionSink,
    Causal,
    Document,
    HeadBias,
    LeftPadding,
    PrefixLM,
    RightPadding,
    SlidingWindow,
    Softcap,
)
from flexsparse.selectors import OracleTopK, Quest, Random

Triple = tuple[Tensor, Tensor, Tensor]


def qkv(
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
    lengths: tuple[int, int] = (8, 8),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Triple:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads[0], lengths[0], dims[0], generator=draw)
    k = torch.randn(batch, heads[1], lengths[1], dims[0], generator=draw)
    v = torch.randn(batch, heads[1], lengths[1], dims[1], generator=draw)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def chosen(
    batch: int = 1,
    heads: int = 1,
    lengths: tuple[int, int] = (8, 8),
    keep: int = 3,
    blocks: tuple[int, int] = (1, 1),
    seed: int = 0,
    holes: float = 0.0,
) -> fs.Selection:
    draw = torch.Generator().manual_seed(seed)
    rows, candidates = (math.ceil(n / block) for n, block in zip(lengths, blocks, strict=True))
    indices = torch.randint(-1, candidates, (batch, heads, rows, keep), generator=draw)
    indices[torch.rand(batch, heads, rows, generator=draw) < holes] = -1
    return fs.Selection.from_indices(
        indices, kv_len=lengths[1], q_len=lengths[0], q_block=blocks[0], kv_block=blocks[1]
    )


REFERENCE = ("rule", "select", "score", "scale", "q_offset", "sink", "fallback")


def expected(tensors: Triple, options: dict[str, Any]) -> fs.Partial:
    return fs.reference(*tensors, **{n: x for n, x in options.items() if n in REFERENCE})


def right(tensors: Triple, *, loose: float = 2e-5, **options: Any) -> None:
    """out and lse are the reference's."""
    out, lse = fs.attention(*tensors, return_lse=True, **options)
    true = expected(tensors, options)
    torch.testing.assert_close(out.double(), true.out, atol=loose, rtol=loose)
    torch.testing.assert_close(lse.double(), true.lse, atol=loose, rtol=loose)


def right_or_refused(tensors: Triple, make: Callable[[], dict[str, Any]]) -> None:
    """Whatever is not refused in the library's own words must be right."""
    try:
        options = make()
        out = fs.attention(*tensors, **options)
    except fs.FlexSparseError:
        return
    true = expected(tensors, options).out
    torch.testing.assert_close(out.double(), true, atol=2e-5, rtol=2e-5)


class Limited(TorchDispatchMode):
    """Ends a computation that does not end by itself, whatever the speed of the machine."""

    def __init__(self, operations: int = 5000) -> None:
        super().__init__()
        self.left = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        assert self.left > 0, "far more operations than the tensors call for"
        return func(*args, **(kwargs or {}))


class Small(TorchDispatchMode):
    """Ends a computation whose tensors are far larger than those it was given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            assert result.numel() < 2**20, f"{func} of {list(result.shape)}"
        return result


# Positions


@pytest.mark.parametrize("offset", [0, -3, -8, -100, 5, 8, 2**20, -(2**20), 2**29, -(2**29)])
def test_an_offset_of_any_size(offset: int) -> None:
    right(qkv(), rule=Causal(), q_offset=offset)
    right(qkv(), rule=~Causal(), q_offset=offset)


@pytest.mark.parametrize("offset", [2**30, 2**31 - 8, -(2**31)])
def test_an_offset_near_32_bits(offset: int) -> None:
    right_or_refused(qkv(), lambda: {"rule": Causal(), "q_offset": offset})
    right_or_refused(qkv(), lambda: {"rule": ~Causal(), "q_offset": offset})


@pytest.mark.parametrize(
    "offset",
    [
        2**31 - 1, 2**31, 2**40, -(2**40), 2**70, torch.tensor([2**33]), torch.tensor(2**31),
    ],
)  # fmt: skip
def test_an_offset_past_32_bits(offset: int | Tensor) -> None:
    right_or_refused(qkv(), lambda: {"rule": Causal(), "q_offset": offset})
    right_or_refused(qkv(), lambda: {"rule": ~Causal(), "q_offset": offset})


@pytest.mark.parametrize(
    "offset",
    [
        torch.tensor(2),
        torch.tensor([2]),
        torch.tensor([2, -3, 0]),
        torch.tensor([2, -3, 0], dtype=torch.int32),
        torch.tensor([0, 9, 2, 9, -3, 9])[::2],
        torch.tensor([1]).expand(3),
    ],
    ids=["0-d", "one", "batch", "int32", "strided", "expanded"],
)
def test_an_offset_tensor_of_any_form(offset: Tensor) -> None:
    right(qkv(batch=3), rule=Causal(), q_offset=offset)


def test_queries_before_and_after_all_keys() -> None:
    tensors = qkv(batch=3, heads=(4, 2), lengths=(20, 40))
    select = chosen(3, 2, (20, 40), keep=2, holes=0.5)
    offset = torch.tensor([-5, 3, 45])
    for pack in (None, "fold", "identity"):
        options = {"select": select, "q_offset": offset, "pack": pack, "tile": 16}
        right(tensors, rule=Causal(), fallback=("local", 5), **options)
        right(tensors, rule=SlidingWindow(9), fallback="self", **options)


def test_a_query_before_the_first_key_is_of_no_document() -> None:
    tensors = qkv(lengths=(12, 8))
    rule = Document(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    try:
        _, lse = fs.attention(*tensors, rule=rule, return_lse=True)
    except fs.FlexSparseError:
        return
    assert (lse[:, :, :4] == -math.inf).all()


# Shapes and strides


@pytest.mark.parametrize("dims", [(1, 1), (1, 7), (31, 31), (31, 7), (3, 130), (257, 1)])
def test_head_dims(dims: tuple[int, int]) -> None:
    right(qkv(dims=dims), rule=Causal())


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 40), (40, 1), (40, 3), (17, 16), (16, 17), (33, 70)]
)
def test_lengths(lengths: tuple[int, int]) -> None:
    tensors = qkv(heads=(4, 2), lengths=lengths)
    select = chosen(1, 2, lengths, keep=2, holes=0.3)
    right(tensors, tile=16)
    right(tensors, rule=Causal(), tile=16)
    right(tensors, rule=Causal(), select=select, tile=16)
    right(tensors, rule=Causal(), select=select, fallback="self", tile=16)


@pytest.mark.parametrize("heads", [(18, 2), (9, 1), (9, 9), (15, 5)])
def test_groups(heads: tuple[int, int]) -> None:
    for lists in {1, *heads}:
        right(qkv(heads=heads), rule=Causal(), select=chosen(1, lists), tile=16)


def seen_as(x: Tensor, how: str) -> Tensor:
    match how:
        case "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "expanded batch":
            return x[:1].expand_as(x)
        case "expanded heads":
            return x[:, :1].expand_as(x)
        case "expanded length":
            return x[:, :, :1].expand_as(x)
        case "every second number":
            return torch.stack([x, -x], -1).flatten(-2)[..., ::2]
        case "channels last":
            return x.to(memory_format=torch.channels_last)
        case "inside a larger one":
            return torch.nn.functional.pad(x, (1, 2, 3, 1, 1, 0), value=math.nan)[:, 1:, 3:-1, 1:-2]
    raise AssertionError(how)


STRIDES = [
    "transposed", "expanded batch", "expanded heads", "expanded length", "every second number",
    "channels last", "inside a larger one",
]  # fmt: skip


@pytest.mark.parametrize("how", STRIDES)
def test_strides(how: str) -> None:
    q, k, v = (seen_as(x, how) for x in qkv(batch=3, heads=(4, 2), lengths=(20, 20)))
    for lists in (1, 2, 4):
        select = chosen(3, lists, (20, 20))
        right((q, k, v), rule=Causal(), select=select, tile=16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(fs.attention(*leaves, rule=Causal(), tile=16).square().sum(), leaves)
    true = torch.autograd.grad(fs.reference(*leaves, rule=Causal()).out.square().sum(), leaves)
    torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


def test_one_tensor_as_queries_keys_and_values() -> None:
    x = qkv()[0].requires_grad_()
    right((x.detach(),) * 3, rule=Causal())
    (got,) = torch.autograd.grad(fs.attention(x, x, x, rule=Causal()).square().sum(), x)
    (true,) = torch.autograd.grad(fs.reference(x, x, x, rule=Causal()).out.square().sum(), x)
    torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


# Candidates


@pytest.mark.parametrize(
    "indices",
    [
        torch.full((1, 1, 8, 5), -1),
        torch.zeros(1, 1, 8, 0, dtype=torch.int64),
        torch.full((1, 2, 8, 100), 5),
        torch.randint(-1, 8, (1, 2, 8, 1000), generator=torch.Generator().manual_seed(0)),
        torch.arange(7, -1, -1).expand(1, 1, 8, 8),
        torch.tensor([3, -1, 3, -1]).expand(1, 2, 8, 4),
    ],
    ids=["none", "no room", "one, again and again", "K of 1000", "falling", "holes"],
)
def test_candidates_of_any_form(indices: Tensor) -> None:
    select = fs.Selection.from_indices(indices, kv_len=8, q_len=8)
    for fallback in (None, "self", ("local", 3), ("local", 1000)):
        right(qkv(), select=select, rule=Causal(), fallback=fallback)
        right(qkv(), select=select, fallback=fallback, q_offset=4)


@pytest.mark.parametrize("blocks", [(100, 1), (1, 100), (7, 17), (50, 50), (3, 64), (64, 3)])
def test_blocks_beside_lengths_and_tiles(blocks: tuple[int, int]) -> None:
    tensors = qkv(heads=(4, 2), lengths=(50, 50))
    for lists in (1, 2, 4):
        select = chosen(1, lists, (50, 50), blocks=blocks)
        right(tensors, select=select, rule=Causal(), tile=(16, 32))
        right(tensors, select=select, tile=(64, 16), pack="fold")


@pytest.mark.parametrize("pack", [None, "fold", "identity"])
@pytest.mark.parametrize("lists", [1, 2, 4])
def test_one_selection_for_all_sequences(lists: int, pack: Any) -> None:
    right(qkv(batch=3, heads=(4, 2)), select=chosen(1, lists), rule=Causal(), pack=pack)
    padded = RightPadding(torch.tensor([3, 8, 0]))
    right(qkv(batch=3, heads=(4, 2)), select=chosen(1, lists), rule=padded, pack=pack)


def test_candidates_in_foreign_strides() -> None:
    indices = torch.randint(-1, 8, (2, 8, 2, 3), generator=torch.Generator().manual_seed(0))
    right(qkv(2, (4, 2)), select=fs.adapters.nsa(indices, kv_len=8, block=1))
    expanded = indices[:1, :1, :1].expand(2, 2, 8, 3)
    right(qkv(2, (4, 2)), select=fs.Selection.from_indices(expanded, kv_len=8, q_len=8))


@pytest.mark.parametrize(
    "blocks",
    [
        (2**40, 1),
        (1, 2**40),
    ],
)
def test_blocks_beyond_all_measure(blocks: tuple[int, int]) -> None:
    with Limited():
        right(qkv(), select=chosen(blocks=blocks), tile=16)


def test_a_fallback_beyond_all_measure() -> None:
    with Limited():
        right(qkv(), select=chosen(keep=0), fallback=("local", 2**30), rule=Causal(), tile=16)


@pytest.mark.parametrize(("index", "kv_len"), [(2**31, 2**33), (2**31 - 1, 2**31)])
def test_candidates_past_32_bits(index: int, kv_len: int) -> None:
    indices = torch.tensor([[[[index, 5]]]])
    try:
        select = fs.Selection.from_indices(indices, kv_len=kv_len, q_len=1)
    except fs.FlexSparseError:
        return
    assert select.indices.tolist() == [[[[5, index]]]]


@pytest.mark.parametrize(
    "options", [{"tile": 2048}, {"select": Quest(block=2048, keep=1, q_block=2048)}]
)
def test_tiles_and_blocks_far_larger_than_the_lengths(options: dict[str, Any]) -> None:
    with Small():
        fs.attention(*qkv(), rule=Causal(), **options)


def test_an_index_of_64_bits_does_not_alias_one_of_32() -> None:
    indices = torch.tensor([[[[2**32 + 1, 2]]]])
    with pytest.raises(fs.FlexSparseError, match=str(2**32 + 1)):
        fs.Selection.from_indices(indices, kv_len=4, q_len=1)
    dropped = fs.Selection.from_indices(indices, kv_len=4, q_len=1, out_of_range="drop")
    assert dropped.indices.tolist() == [[[[2, -1]]]]


@pytest.mark.parametrize("candidates", [[0, 0, 3, 3], [0, 9, -1, 2]], ids=["repeated", "outside"])
def test_a_selection_made_by_hand(candidates: list[int]) -> None:
    indices = torch.tensor(candidates, dtype=torch.int32).expand(1, 1, 8, 4)
    meant = fs.Selection.from_indices(indices, kv_len=8, q_len=8, out_of_range="drop")
    try:
        out = fs.attention(*qkv(), select=fs.Selection(indices, 8, 8))
    except fs.FlexSparseError:
        return
    torch.testing.assert_close(out, fs.attention(*qkv(), select=meant))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_the_algebra_of_selections(data: st.DataObject) -> None:
    lengths = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)), label="lengths")
    made = []
    for name in ("a", "b"):
        blocks = data.draw(st.tuples(*[st.sampled_from([1, 2, 4, 8, 32])] * 2), label=name)
        heads, batch = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (1, 2)]))
        keep, seed = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 99))
        made.append(chosen(batch, heads, lengths, keep, blocks, seed, holes=0.2))
    a, b = made
    shapes = [max(x, y) for x, y in zip(a.dense().shape[:2], b.dense().shape[:2], strict=True)]
    dense = [
        x.dense().expand(shapes[0], *x.dense().shape[1:]).repeat_interleave(shapes[1] // x.heads, 1)
        for x in (a, b)
    ]
    for got, true in (((a | b), dense[0] | dense[1]), ((a & b), dense[0] & dense[1])):
        assert torch.equal(got.dense(), true)
        used = got.indices >= 0
        assert (used[..., 1:] <= used[..., :-1]).all(), "unused slots come last"
        rising = got.indices[..., 1:] > got.indices[..., :-1]
        assert (rising | ~used[..., 1:]).all(), "unique and rising"
    fine = a.refine(q_block=1, kv_block=1)
    assert torch.equal(fine.dense(), a.dense())


# Rules


def right_rule(make: Callable[[], Any], lengths: tuple[int, int] = (8, 8)) -> None:
    right(qkv(lengths=lengths), rule=make())


@dataclass(frozen=True, eq=False)
class Near(fs.MaskRule):
    width: Any

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width


@dataclass(frozen=True, eq=False)
class NearByHead(fs.MaskRule):
    width: Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width[h]


@dataclass(frozen=True, eq=False)
class Strict(fs.MaskRule):
    strict: bool
    kind: str = "causal"
    at: tuple[int, ...] = (1, 2)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = q_idx > kv_idx if self.strict else q_idx >= kv_idx
        for i in self.at:
            seen = seen | (kv_idx == i)
        return seen if self.kind == "causal" else ~seen


class Method:
    width = 3

    def see(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width


class Call(Method):
    __call__ = Method.see


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width


def width_first(width: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < width


three, flag = torch.tensor(3), torch.tensor(True)
odd = torch.tensor([False, True] * 4)
small = torch.tensor([True, False, True])

FORMS: dict[str, Callable[[], Any]] = {
    "a 0-d tensor": lambda: Near(torch.tensor(3)),
    "a 0-d float": lambda: Near(torch.tensor(2.5)),
    "a 0-d tensor of bf16": lambda: Near(torch.tensor(2.5, dtype=torch.bfloat16)),
    "a Parameter": lambda: Near(torch.nn.Parameter(torch.tensor(2.5))),
    "a table of Parameters": lambda: NearByHead(torch.nn.Parameter(torch.tensor([3.0, 1.0]))),
    "an expanded table": lambda: NearByHead(torch.tensor([2]).expand(2)),
    "a float": lambda: Near(2.5),
    "infinity": lambda: Near(math.inf),
    "not a number": lambda: Near(math.nan),
    "a numpy number": lambda: Near(torch.tensor(3).numpy()[()]),
    "a negative number": lambda: Near(-1),
    "a bool, text and a tuple": lambda: Strict(True),
    "the other bool and text": lambda: Strict(False, "anti", ()),
    "a closed over 0-d tensor": lambda: lambda b, h, q, kv: (q - kv).abs() < three,
    "a closed over flag, alone": lambda: lambda b, h, q, kv: flag,
    "a default argument": lambda: lambda b, h, q, kv, width=3: (q - kv).abs() < width,
    "a keyword argument": lambda: lambda b, h, q, kv, *, width=3: (q - kv).abs() < width,
    "any arguments": lambda: lambda *at: at[2] >= at[3],
    "partial, first": lambda: partial(width_first, 3),
    "partial, keyword": lambda: partial(
        lambda b, h, q, kv, width: (q - kv).abs() < width, width=3
    ),
    "a bound method": lambda: Method().see,
    "a callable object": lambda: Call(),
    "a module": lambda: Module(),
    "the batch alone": lambda: lambda b, h, q, kv: b == 0,
    "the head alone": lambda: lambda b, h, q, kv: h == 1,
    "nothing": lambda: lambda b, h, q, kv: b < 0,
    "a product of bools": lambda: lambda b, h, q, kv: (q >= kv) * (kv < 5),
    "where of constants": lambda: lambda b, h, q, kv: torch.where(q >= kv, True, False),
    "xor": lambda: lambda b, h, q, kv: (q > kv) ^ (kv > 2),
    "shifts": lambda: lambda b, h, q, kv: ((q >> 1) & 1) == (kv & 1),
    "floor of a negative": lambda: lambda b, h, q, kv: (kv - q) // 3 == -1,
    "remainder of a negative": lambda: lambda b, h, q, kv: (kv - q) % 3 == 1,
    "true division": lambda: lambda b, h, q, kv: q / 2 < kv,
    "a power": lambda: lambda b, h, q, kv: (q - kv) ** 2 < 5,
    "logarithms": lambda: lambda b, h, q, kv: torch.log2((q - kv).abs() + 1.0) % 1 == 0,
    "a clamped table": lambda: lambda b, h, q, kv: small[kv.clamp(max=2)],
    "a slice of a table": lambda: lambda b, h, q, kv: odd[:8][kv],
    "a table read by a table": lambda: lambda b, h, q, kv: odd[odd[q].int() + odd[kv].int()],
}  # fmt: skip


@pytest.mark.parametrize("make", FORMS.values(), ids=[name.replace(" ", "-") for name in FORMS])
def test_a_rule_of_any_form(make: Callable[[], Any]) -> None:
    right_rule(make)


@pytest.mark.parametrize("length", [33, 70])
def test_a_table_exactly_as_long_as_the_keys(length: int) -> None:
    draw = torch.Generator().manual_seed(0)
    by_key = torch.rand(length, generator=draw) < 0.5
    by_pair = torch.rand(33, length, generator=draw) < 0.5
    tensors = qkv(lengths=(33, length))
    right(tensors, rule=lambda b, h, q, kv: by_key[kv], tile=16)
    right(tensors, rule=lambda b, h, q, kv: by_pair[q, kv], tile=16, q_offset=0)
    bias = torch.randn(2, 33, length, generator=draw)
    right(tensors, score=lambda s, b, h, q, kv: s + bias[h, q, kv], tile=16, q_offset=0)


def test_rules_thirty_deep() -> None:
    rule = Causal()
    for i in range(30):
        once = fs.MaskRule.of(lambda b, h, q, kv, i=i: (q + kv) % 31 == i)
        rule = (rule & ~once) if i % 2 else (rule | Near(1))
    right(qkv(), rule=rule)


def test_a_thousand_rules_joined() -> None:
    right(qkv(), rule=reduce(lambda a, b: a | b, [SlidingWindow(3)] * 1000))


def test_a_rule_is_not_run_again_when_it_is_composed() -> None:
    calls: list[int] = []

    def counted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        calls.append(1)
        return q_idx >= kv_idx

    rule = fs.MaskRule.of(counted)
    made = len(calls)
    reduce(lambda a, b: a | ~b, [rule] * 12)
    assert len(calls) == made


@pytest.mark.parametrize(
    "make",
    [
        lambda: Causal(),
        lambda: SlidingWindow(3),
        lambda: Causal() & (SlidingWindow(3) | AttentionSink(2)),
        lambda: Document(torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])),
        lambda: PrefixLM(3),
        lambda: LeftPadding(torch.tensor([2])),
        lambda: RightPadding(torch.tensor([6])),
        lambda: fs.MaskRule.of(lambda b, h, q, kv: ((q >> 1) & 1) == 0),
        lambda: fs.MaskRule.of(lambda b, h, q, kv: q.float() / 2 < kv),
        lambda: fs.MaskRule.of(lambda b, h, q, kv: torch.subtract(q, kv) > 0),
    ],
    ids=["causal", "window", "streaming", "document", "prefix", "left", "right", "shift", "float",
         "subtract"],
)  # fmt: skip
def test_a_rule_made_in_inference_mode(make: Callable[[], Any]) -> None:
    with torch.inference_mode():
        right(qkv(), rule=make())


@pytest.mark.parametrize(
    "make", [lambda: Alibi(torch.ones(2)), lambda: Softcap(3.0), lambda: HeadBias(torch.ones(2, 4))]
)
def test_a_score_made_in_inference_mode(make: Callable[[], Any]) -> None:
    with torch.inference_mode():
        right(qkv(), score=make(), rule=Causal())
        right(qkv(), score=make() >> make(), select=Quest(block=2, keep=2, q_block=2).select(
            *qkv()[:2], fs.Grid(8, 8)
        ))  # fmt: skip


def test_what_inference_mode_made_serves_training() -> None:
    rule, score, window = Causal(), Softcap(3.0), SlidingWindow(3)
    tensors = qkv()
    with torch.inference_mode():
        for options in ({"rule": rule}, {"score": score}, {"rule": window, "score": score}):
            fs.attention(*tensors, **options)
    leaves = [x.requires_grad_() for x in tensors]
    for options in ({"rule": rule}, {"score": score}, {"rule": window, "score": score}):
        got = torch.autograd.grad(fs.attention(*leaves, **options).square().sum(), leaves)
        true = torch.autograd.grad(fs.reference(*leaves, **options).out.square().sum(), leaves)
        torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


BIG = sys.maxsize


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlidingWindow(BIG),
        lambda: SlidingWindow(2**70),
        lambda: lambda b, h, q, kv: q - kv < 2**40,
        lambda: lambda b, h, q, kv, far=2**40: (q - kv).abs() < far,
        lambda: lambda b, h, q, kv: (q * 2_654_435_761 + kv * 40_503) % 7 < 3,
    ],
    ids=["maxsize", "past 64 bits", "literal", "default", "hash"],
)
def test_a_number_past_32_bits(make: Callable[[], Any]) -> None:
    right_or_refused(qkv(), lambda: {"rule": make()})


def test_arithmetic_past_32_bits() -> None:
    tensors = qkv(lengths=(64, 64))
    rule = fs.MaskRule.of(lambda b, h, q, kv: (q * 100_000 * 100_000 + kv * 7919) % 7 < 3)
    right_or_refused(tensors, lambda: {"rule": rule})


@dataclass(frozen=True, eq=False)
class InASet(fs.MaskRule):
    mode: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.mode in {1, 2}:
            return q_idx >= kv_idx
        return q_idx <= kv_idx


@dataclass(frozen=True, eq=False)
class ByName(fs.MaskRule):
    mode: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < {1: 2, 2: 5}.get(self.mode, 1)


@dataclass(frozen=True, eq=False)
class ByKind(fs.MaskRule):
    width: Any

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        width = self.width if isinstance(self.width, int) else self.width + 3
        return (q_idx - kv_idx).abs() < width


@dataclass(frozen=True, eq=False)
class ToThePower(fs.MaskRule):
    level: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() * 2**self.level < 1


@pytest.mark.parametrize(
    "make", [lambda: InASet(1), lambda: ByName(2), lambda: ByKind(2), lambda: ToThePower(-2)]
)
def test_a_number_means_what_it_means_in_python(make: Callable[[], Any]) -> None:
    right_or_refused(qkv(), lambda: {"rule": make()})


@pytest.mark.parametrize(
    "rule",
    [
        lambda b, h, q, kv: kv < q.numel(),
        lambda b, h, q, kv: (q >= kv) & (kv < q.size(2)),
        lambda b, h, q, kv: torch.zeros(q.shape, dtype=torch.bool) | (q >= kv),
        lambda b, h, q, kv: q.new_ones(q.shape, dtype=torch.bool) & (q >= kv),
    ],
    ids=["numel", "size", "zeros", "new_ones"],
)
def test_the_shape_of_an_index(rule: Any) -> None:
    right_or_refused(qkv(lengths=(20, 20)), lambda: {"rule": rule})


def test_the_dtype_of_an_index() -> None:
    rule = fs.MaskRule.of(lambda b, h, q, kv: q >= kv if q.dtype == torch.int32 else q < kv)
    right_or_refused(qkv(), lambda: {"rule": rule})


@dataclass(frozen=True, eq=False)
class Slope(fs.MaskRule):
    slope: float

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < q_idx * self.slope


def test_a_float_decides_the_same_pairs() -> None:
    for slope in (0.1, 0.3, 1.1):
        right(qkv(lengths=(64, 64)), rule=Slope(slope))


def test_a_float_decides_the_same_pairs_in_fp64() -> None:
    right(qkv(lengths=(64, 64), dtype=torch.float64), rule=Slope(1.1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_float_decides_the_same_pairs_under_any_default_dtype(dtype: torch.dtype) -> None:
    tensors = qkv(lengths=(64, 64))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        right(tensors, rule=Slope(1.1))
    finally:
        torch.set_default_dtype(before)


class Width(int):
    """An int that may not be compared one by one with all others, as an IntEnum would be."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("searched for")

    __hash__ = int.__hash__


class Level(enum.IntEnum):
    LOW = 3


def test_an_int_of_a_subclass() -> None:
    right_rule(lambda: Near(Width(3)))
    right_rule(lambda: Near(Level.LOW))


@dataclass(frozen=True, eq=False, slots=True)
class Slotted(fs.MaskRule):
    width: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width


def test_a_rule_with_slots() -> None:
    right_rule(lambda: Slotted(3))


@dataclass(frozen=True, eq=False)
class Halved(fs.MaskRule):
    width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "half", self.width // 2)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.half


@dataclass(frozen=True, eq=False)
class Checked(fs.MaskRule):
    width: int

    def __post_init__(self) -> None:
        assert self.width > 0

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width


@dataclass(frozen=True, eq=False)
class Quartered(Checked):
    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "quarter", self.width // 4)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.quarter


@pytest.mark.parametrize("make", [lambda: Halved(6), lambda: Quartered(12)])
def test_a_rule_that_prepares_itself_as_python_teaches(make: Callable[[], Any]) -> None:
    right_rule(make)


def test_a_rule_of_functions_that_name_each_other() -> None:
    def even(n: int, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv if n == 0 else uneven(n - 1, q, kv)

    def uneven(n: int, q: Tensor, kv: Tensor) -> Tensor:
        return q <= kv if n == 0 else even(n - 1, q, kv)

    right_rule(lambda: lambda b, h, q, kv: even(2, q, kv))


def test_a_default_device_without_memory() -> None:
    tensors, rule = qkv(), SlidingWindow(3)
    with torch.device("meta"):
        out = fs.attention(*tensors, rule=rule)
    true = fs.reference(*tensors, rule=rule).out
    torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "tiles", "decode", "gather", "dense"])
def test_candidates_under_a_default_device_without_memory(backend: Any) -> None:
    """Nothing is made on any device but that of the tensors; what it touches is counted there too."""
    q, k, v = qkv()
    q_len, kv_len = q.shape[2], k.shape[2]
    chosen = torch.randint(
        0, kv_len // 4, (1, 1, q_len, 3), generator=torch.Generator().manual_seed(0)
    )
    select = fs.Selection.from_indices(chosen, kv_len=kv_len, q_len=q_len, kv_block=4)
    with torch.device("meta"):
        result = fs.make_plan(q, k, v, rule=Causal(), select=select, backend=backend).run(q, k, v)
        assert result.budget().logical_pairs > 0
    true = fs.reference(q, k, v, rule=Causal(), select=select).out
    torch.testing.assert_close(result.out.double(), true, atol=1e-5, rtol=1e-5)


# Scores and sinks


def gradients(
    leaves: list[Tensor], options: dict[str, Any], run: Callable[..., Any]
) -> tuple[Tensor, ...]:
    learned = [x for x in (options.get("sink"), *options.pop("learned", ())) if x is not None]
    out, lse = run(*leaves, **options)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (out, lse)]
    seen = torch.where(lse == -math.inf, 0.0, lse.double())
    loss = (out.double() * weights[0]).sum() + (seen * weights[1]).sum()
    found = torch.autograd.grad(loss, [*leaves, *learned], allow_unused=True)
    return tuple(
        torch.zeros_like(x) if g is None else g
        for x, g in zip([*leaves, *learned], found, strict=True)
    )


def right_gradients(tensors: Triple, loose: float = 2e-4, **options: Any) -> None:
    leaves = [x.detach().requires_grad_() for x in tensors]
    got = gradients(leaves, dict(options), partial(fs.attention, return_lse=True))
    true = gradients(leaves, {n: x for n, x in options.items() if n != "tile"}, fs.reference)
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=loose, rtol=loose)


SCORES: dict[str, Callable[[Tensor], Any]] = {
    "per head": lambda w: lambda s, b, h, q, kv: s + w[h],
    "twice": lambda w: lambda s, b, h, q, kv: s * w[h] + w[h] * kv / 8,
    "0-d": lambda w: lambda s, b, h, q, kv: s * w.mean(),
    "per query": lambda w: lambda s, b, h, q, kv: s + w.repeat(4)[q],
    "no score, per pair": lambda w: lambda s, b, h, q, kv: w[h] * (q - kv) / 8,
    "in fp16": lambda w: lambda s, b, h, q, kv: (s.half() + w[h].half()).float(),
    "hidden in parts": lambda w: lambda s, b, h, q, kv: torch.where(kv % 3 == 0, -math.inf, s + w[h]),
    "hidden in whole": lambda w: lambda s, b, h, q, kv: torch.where(q < 4, -math.inf, s + w[h]),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in SCORES if n not in ("0-d", "per query")])
def test_a_learned_score_of_any_form(name: str) -> None:
    learned = torch.tensor([0.5, -1.0], requires_grad=True)
    loose = 2e-2 if name == "in fp16" else 2e-4
    score = SCORES[name](learned)
    right_gradients(qkv(), loose, score=score, learned=(learned,))
    if name != "hidden in whole":  # what torch gives there is not a number
        right_gradients(qkv(), loose, score=score, rule=Causal(), learned=(learned,))


def test_a_learned_score_that_is_computed_outside() -> None:
    learned = torch.tensor([0.5, -1.0], requires_grad=True)
    mean, table = learned.mean(), learned.repeat(4)
    right_gradients(qkv(), score=lambda s, b, h, q, kv: s * mean, learned=(mean,))
    right_gradients(qkv(), score=lambda s, b, h, q, kv: s + table[q], learned=(table,))


def test_a_score_of_the_queries_themselves() -> None:
    q, k, v = qkv()
    q.requires_grad_()

    def run(door: Callable[..., Any]) -> Tensor:
        own = q.mean(-1)
        out = door(q, k, v, rule=Causal(), score=lambda s, b, h, q, kv: s + own[b, h, q] * kv)
        return torch.autograd.grad((out if isinstance(out, Tensor) else out.out).square().sum(), q)[
            0
        ]

    torch.testing.assert_close(run(fs.attention), run(fs.reference), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: lambda s, b, h, q, kv: w[h] * kv / 8,
        lambda w: lambda s, b, h, q, kv: w[h] * q / 8,
        lambda w: lambda s, b, h, q, kv: w[h] + 0.0,
    ],
    ids=["keys alone", "queries alone", "heads alone"],
)
def test_a_score_that_forgets_the_score(make: Callable[[Tensor], Any]) -> None:
    learned = torch.tensor([0.5, -1.0], requires_grad=True)
    right_gradients(qkv(), rule=Causal(), score=make(learned), learned=(learned,))


def test_a_score_that_forgets_the_score_forward() -> None:
    right(qkv(), rule=Causal(), score=lambda s, b, h, q, kv: kv / 8.0)
    right(qkv(), rule=Causal(), score=lambda s, b, h, q, kv: h / 8.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_learned_table_of_another_dtype(dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, -1.0], dtype=dtype, requires_grad=True)
    out = fs.attention(*qkv(), rule=Causal(), score=Alibi(slopes))
    assert out.dtype == torch.float32
    (grad,) = torch.autograd.grad(out.square().sum(), slopes)
    assert grad.dtype == dtype
    true = fs.reference(*qkv(), rule=Causal(), score=Alibi(slopes)).out
    (wanted,) = torch.autograd.grad(true.square().sum(), slopes)
    torch.testing.assert_close(grad.double(), wanted.double(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_of_some_and_not_of_others(wanted: int) -> None:
    tensors = qkv(heads=(4, 2))
    leaves = [x.requires_grad_() for i, x in enumerate(tensors) if wanted >> i & 1]
    out, lse = fs.attention(*tensors, rule=Causal(), return_lse=True)
    true = fs.reference(*tensors, rule=Causal())
    for a, b in (
        (out, true.out),
        (lse, true.lse),
        (out.sum(-1) * lse, true.out.sum(-1) * true.lse),
    ):
        if not b.requires_grad:
            assert not any(
                g is not None and g.any()
                for g in torch.autograd.grad(a.sum(), leaves, retain_graph=True, allow_unused=True)
            )
            continue
        got, right = (
            torch.autograd.grad(x.square().sum(), leaves, retain_graph=True, allow_unused=True)
            for x in (a, b)
        )
        for x, y in zip(got, right, strict=True):
            zero = torch.zeros(())
            x, y = (zero if g is None else g for g in (x, y))
            torch.testing.assert_close(x.sum(), y.sum(), atol=1e-3, rtol=1e-3)


def test_gradients_of_an_intermediate_tensor() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    got = torch.autograd.grad(fs.attention(q * 2, k, v, rule=Causal()).square().sum(), q)
    true = torch.autograd.grad(fs.reference(q * 2, k, v, rule=Causal()).out.square().sum(), q)
    torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


def test_gradients_of_the_sink_alone_and_of_a_tensor_used_twice() -> None:
    sink = torch.tensor([0.5, -1.0], requires_grad=True)
    for options in ({}, {"score": Alibi(sink)}):
        pair = [
            torch.autograd.grad(out.square().sum(), sink)[0]
            for out in (
                fs.attention(*qkv(), rule=Causal(), sink=sink, **options),
                fs.reference(*qkv(), rule=Causal(), sink=sink, **options).out,
            )
        ]
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sink", [[0.0, 0.0], [1e30, -1e30], [50.0, -50.0], [-math.inf, 0.0]])
def test_sinks_of_any_size(sink: list[float]) -> None:
    right(qkv(), rule=Causal(), sink=torch.tensor(sink))
    right(qkv(), rule=Causal(), sink=torch.tensor(sink).repeat_interleave(2)[::2])


def test_no_sink_and_nothing_to_see() -> None:
    sink = torch.tensor([-math.inf, 0.0], requires_grad=True)
    nothing = fs.Selection.from_indices(torch.full((1, 1, 8, 1), -1), kv_len=8, q_len=8)
    out, lse = fs.attention(*qkv(), select=nothing, sink=sink, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse[0], torch.tensor([[-math.inf] * 8, [0.0] * 8]))
    (grad,) = torch.autograd.grad(out.sum() + lse[0, 1].sum(), sink)
    assert torch.equal(grad, torch.tensor([0.0, 8.0]))


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, 1e-30, 30])
def test_scales(scale: float) -> None:
    right(qkv(), rule=Causal(), scale=scale)
    right_gradients(qkv(), rule=Causal(), scale=scale, loose=2e-3)


# Garbage where nobody looks


def test_tiles_that_are_not_listed_may_hold_anything() -> None:
    q, k, v = qkv(lengths=(16, 64))
    k[:, :, 32:] = math.nan
    v[:, :, 32:] = math.inf
    right((q, k, v), rule=lambda b, h, q, kv: kv < 32, tile=16, q_offset=0)


def test_sanitize_lets_hidden_keys_hold_anything() -> None:
    q, k, v = qkv(lengths=(16, 64))
    clean = q, k.clone(), v.clone()
    k[:, :, 30:] = math.nan
    v[:, :, 30:] = math.inf
    options = {"rule": lambda b, h, q, kv: kv < 30, "tile": 16, "sanitize": True}
    leaves = [[x.detach().clone().requires_grad_() for x in given] for given in ((q, k, v), clean)]
    outs = [fs.attention(*given, **options) for given in leaves]
    torch.testing.assert_close(outs[0], outs[1])
    grads = [torch.autograd.grad(o.square().sum(), x) for o, x in zip(outs, leaves, strict=True)]
    torch.testing.assert_close(grads[0], grads[1])


def test_a_query_that_sees_nothing_may_hold_anything() -> None:
    q, k, v = qkv()
    q[:, :, 3] = math.nan
    out, lse = fs.attention(q, k, v, rule=lambda b, h, q, kv: q != 3, return_lse=True)
    assert torch.equal(out[:, :, 3], torch.zeros_like(out[:, :, 3]))
    assert (lse[:, :, 3] == -math.inf).all()
    assert out.isfinite().all()


def test_scores_too_large_for_their_dtype() -> None:
    q, k, v = qkv(dims=(64, 8), dtype=torch.float16)
    right((q * 200, k * 200, v), rule=Causal(), loose=1e-1)


# Modes of torch


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        tensors = qkv()
    right(tensors, rule=Causal(), select=chosen())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    tensors, rule = qkv(), Causal()
    with torch.autocast("cpu", dtype=dtype):
        out = fs.attention(*tensors, rule=rule, sink=torch.zeros(2), score=Alibi(torch.ones(2)))
        report = fs.check(*tensors, rule=rule, grads=True)
    assert out.dtype == dtype
    assert report.ok, report


def test_autocast_of_two_dtypes() -> None:
    tensors, rule = qkv(), Causal()
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        for _ in range(3):
            with torch.autocast("cpu", dtype=dtype):
                assert fs.attention(*tensors, rule=rule).dtype == dtype


def test_checkpointing() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    for reentrant in (True, False):
        out = torch.utils.checkpoint.checkpoint(
            lambda q: fs.attention(q, k, v, rule=Causal()), q, use_reentrant=reentrant
        )
        got = torch.autograd.grad(out.square().sum(), q) if not reentrant else None
        if reentrant:
            out.square().sum().backward()
            got = (q.grad,)
        true = torch.autograd.grad(fs.reference(q, k, v, rule=Causal()).out.square().sum(), q)
        torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["tiles", "gather"])
def test_a_second_derivative_is_refused_not_wrong(backend: Any) -> None:
    q, k, v = qkv()
    q.requires_grad_()
    indices = torch.zeros(1, 1, q.shape[2], 1, dtype=torch.int64)
    select = fs.Selection.from_indices(indices, q_len=q.shape[2], kv_len=k.shape[2])
    out = fs.attention(q, k, v, rule=Causal(), select=select, backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(fs.FlexSparseError, match="gradients of gradients"):
        torch.autograd.grad(grad.sum(), q)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("asked", ["lse", "score", "sink", "plain"])
@pytest.mark.parametrize("backend", ["dense", "tiles", "gather"])
def test_what_changes_before_its_backward_is_refused_or_was_copied(
    backend: Any, asked: str, which: int
) -> None:
    """In whichever way a backend finds its gradients: never those of other numbers."""
    leaves = [x.requires_grad_() for x in qkv()]
    indices = torch.arange(leaves[0].shape[2])[None, None, :, None]
    options: dict[str, Any] = {"rule": Causal(), "select": fs.Selection.from_indices(
        indices, q_len=leaves[0].shape[2], kv_len=leaves[1].shape[2]
    ), "return_lse": asked == "lse"}  # fmt: skip
    if asked == "score" and backend != "gather":
        options["score"] = Alibi(torch.linspace(0.1, 1, leaves[0].shape[1]))
    elif asked == "sink":
        options["sink"] = torch.zeros(leaves[0].shape[1])

    def loss(found: Any) -> Tensor:
        return sum((x.double().square().sum() for x in found), torch.zeros(()))

    def given(changes: bool) -> list[Tensor]:
        read = [x * 1 for x in leaves]
        found = fs.attention(*read, **options, backend=backend)
        total = loss(found if isinstance(found, tuple) else (found,))
        if changes:
            with torch.no_grad():
                read[which].mul_(2)
        return list(torch.autograd.grad(total, leaves))

    true = given(False)
    try:
        got = given(True)
    except (RuntimeError, fs.FlexSparseError) as error:
        assert "inplace" in str(error) or "in place" in str(error)
        return
    for ours, theirs in zip(got, true, strict=True):
        assert torch.equal(ours, theirs)


def test_a_held_plan_names_autocast() -> None:
    q, k, v = qkv()
    plan = fs.make_plan(q, k, v, rule=Causal())
    with torch.autocast("cpu"), pytest.raises(fs.FlexSparseError, match="torch.autocast casts"):
        plan.run(q, k, v)


@pytest.mark.parametrize("how", ["vmap", "grad", "jvp"])
def test_torch_func_is_refused_by_name(how: str) -> None:
    q, k, v = qkv()

    def run(q: Tensor) -> Tensor:
        return fs.attention(q, k, v, rule=Causal()).sum()

    uses = {
        "grad": lambda: torch.func.grad(run)(q),
        "vmap": lambda: torch.func.vmap(run)(q[None]),
        "jvp": lambda: torch.func.jvp(run, (q,), (q,)),
    }
    with pytest.raises(fs.FlexSparseError, match="torch.func"):
        uses[how]()


# Doors


@pytest.mark.parametrize(
    "options",
    [{"empty": "zero"}, {"sanitize": True}, {"select": Quest(block=2, keep=2, q_block=2)}],
)
def test_the_reference_takes_the_shared_keywords(options: dict[str, Any]) -> None:
    out = fs.attention(*qkv(), rule=Causal(), **options)
    true = fs.reference(*qkv(), rule=Causal(), **options).out
    torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


def test_check_takes_every_keyword() -> None:
    select = chosen(lengths=(20, 20), holes=0.3)
    report = fs.check(
        *qkv(lengths=(20, 20)), rule=Causal(), select=select, score=Softcap(3.0), scale=0.3,
        q_offset=0, sink=torch.zeros(2, requires_grad=True), fallback=("local", 2), empty="error",
        sanitize=True, tile=16, pack="fold", rows=7, grads=True, seed=-1,
    )  # fmt: skip
    assert report.ok, report
    assert {"out", "lse", "dq", "dk", "dv", "dsink"} == {d.name for d in report.differences}


@pytest.mark.parametrize("rows", [1, 8, 10**9])
def test_check_of_any_number_of_rows(rows: int) -> None:
    assert fs.check(*qkv(), rule=Causal(), rows=rows).ok


def test_check_of_nothing_at_all() -> None:
    assert fs.check(*qkv(), rule=lambda b, h, q, kv: b < 0, grads=True).ok


def test_check_of_a_learned_tensor_that_was_computed() -> None:
    slopes = torch.ones(2, requires_grad=True)
    assert fs.check(*qkv(), score=Alibi(slopes * 2), grads=True).ok


def test_check_of_a_score_that_forgets_the_score() -> None:
    assert fs.check(*qkv(), score=lambda s, b, h, q, kv: kv / 8.0, grads=True).ok


def test_check_in_inference_mode() -> None:
    with torch.inference_mode():
        try:
            report = fs.check(*qkv(), rule=lambda b, h, q, kv: q >= kv, grads=True)
        except fs.FlexSparseError:
            return
    assert report.ok


@dataclass(frozen=True, eq=False, kw_only=True)
class Moody(fs.Selector):
    """Chooses for each head, or for all, as the queries say."""

    def select(self, q: Tensor, k: Tensor, grid: fs.Grid, rule: Any = None) -> fs.Selection:
        return chosen(1, 2 if q[0, 0, 0, 0] > 0 else 1)


def test_a_selector_that_changes_the_form_of_its_selections() -> None:
    q, k, v = qkv()
    selector = Moody()
    for sign in (1, -1, 1):
        q[0, 0, 0, 0] = sign
        for _ in range(4):
            out = fs.attention(q, k, v, select=selector)
            true = fs.reference(q, k, v, select=chosen(1, 2 if sign > 0 else 1)).out
            torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


def test_a_selector_of_keys_that_are_not_numbers() -> None:
    q, k, _ = qkv()
    k[0, 0, 3] = math.nan
    select = Quest(block=2, keep=1, q_block=2).select(q, k, fs.Grid(8, 8))
    assert not (select.indices[:, 0] == 1).any()


@pytest.mark.parametrize("selector", [Quest, OracleTopK, Random])
def test_selectors_beside_any_length(selector: Any) -> None:
    for lengths in ((1, 1), (1, 40), (40, 1), (17, 33)):
        q, k, _ = tensors = qkv(2, (4, 2), lengths)
        for block, keep, q_block in ((1, 1, 1), (7, 3, 5), (100, 50, 100)):
            made = selector(block=block, keep=keep, q_block=q_block)
            select = made.select(q, k, fs.Grid(*lengths, batch=2), Causal())
            right(tensors, select=select, rule=Causal(), tile=16)


# What a plan holds on to


def test_a_held_plan_after_a_change_of_its_table() -> None:
    tensors = qkv(lengths=(8, 64))
    seen = torch.arange(64) < 50
    rule = fs.MaskRule.of(lambda b, h, q, kv: seen[kv])
    plan = fs.make_plan(*tensors, rule=rule, tile=16)
    old = plan.run(*tensors).out
    seen.copy_((torch.arange(64) > 20) & (torch.arange(64) < 55))
    new = fs.reference(*tensors, rule=rule).out.float()
    try:
        out = plan.run(*tensors).out
    except fs.FlexSparseError:
        return
    assert torch.allclose(out, old, atol=1e-5) or torch.allclose(out, new, atol=1e-5)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({"rule": SlidingWindow(2)}, {"rule": SlidingWindow(6)}),
        ({"rule": Causal(), "q_offset": 1}, {"rule": Causal(), "q_offset": 3}),
        ({"rule": Near(torch.tensor(2))}, {"rule": Near(torch.tensor(5))}),
    ],
    ids=["number", "offset", "tensor"],
)
def test_a_layout_of_another_rule_of_the_same_kind(
    mine: dict[str, Any], other: dict[str, Any]
) -> None:
    tensors = qkv()
    layout = fs.make_plan(*tensors, **other).first
    try:
        out = fs.make_plan(*tensors, **mine).run(*tensors, layout).out
    except fs.FlexSparseError:
        return
    torch.testing.assert_close(
        out.double(), fs.reference(*tensors, **mine).out, atol=1e-5, rtol=1e-5
    )


def test_a_plan_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    door = importlib.import_module("flexsparse.attention")
    made: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> fs.Plan:
        made.append(1)
        return fs.make_plan(*args, **kwargs)

    monkeypatch.setattr(door, "make_plan", counted)
    tensors, rule, select = qkv(), Causal(), chosen()
    between = []
    for n in range(5):
        fs.attention(*tensors, rule=rule, select=select, fallback=("local", 2 + 0 * n))
        # Something takes the place in memory that the call left.
        between.append([{str(i): i for i in range(12)} for _ in range(3)])
    assert len(made) == 1


config = SimpleNamespace(width=2)
lookup = {"width": 2}
widths = [2]
window = SlidingWindow(2)
factor = 2


def by_namespace(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < config.width


def by_dict(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < lookup["width"]


def by_list(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < widths[0]


def by_rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return window(b, h, q_idx, kv_idx)


def by_inner_function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return reduce(lambda seen, i: seen | (kv_idx == i * factor), range(3), q_idx == kv_idx)


@dataclass(frozen=True, eq=False)
class ByGlobal(fs.MaskRule):
    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < factor


@dataclass(frozen=True, eq=False)
class ByClass(fs.MaskRule):
    width = 2

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width


class ByAttribute(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 2

    def forward(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width


def by_set(held: set[int]) -> Any:
    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(lambda seen, i: seen | (kv_idx == i), held, q_idx == kv_idx)

    return rule


class BySlot:
    __slots__ = ("width",)

    def __init__(self) -> None:
        self.width = 2


class Constants:
    width = 2


class ByProperty:
    @property
    def width(self) -> int:
        return factor


groups = [[1, 2], [3]]
named = {"causal": 0}
slotted, prepared = BySlot(), ByProperty()
array = torch.tensor([2]).numpy()


def by_slot(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < slotted.width


def by_constant(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < Constants.width


def by_property(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < prepared.width


def by_array(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < int(array[0])


def by_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx if "causal" in named else q_idx <= kv_idx


settings_file = ModuleType("settings_file")
settings_file.width = 2  # type: ignore[attr-defined]


def by_module(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < settings_file.width


def by_environment(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < int(os.environ["WIDTH"])


@dataclass(frozen=True, eq=False)
class ByGetattr(fs.MaskRule):
    width = 2

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        name = "width"
        return (q_idx - kv_idx).abs() < getattr(self, name)


def by_group(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    seen = q_idx == kv_idx
    for i, group in enumerate(groups):
        for n in group:
            seen = seen | ((kv_idx == n) & (q_idx % 2 == i))
    return seen


some, module = {1, 2}, ByAttribute()


def rebind(name: str, value: Any) -> None:
    globals()[name] = value


CHANGES: dict[str, tuple[Any, Callable[[Any], Any], Any, Any]] = {
    "an attribute of a global": (by_namespace, lambda n: setattr(config, "width", n), 2, 6),
    "an entry of a global dict": (by_dict, lambda n: lookup.update(width=n), 2, 6),
    "an entry of a global list": (by_list, lambda n: widths.__setitem__(0, n), 2, 6),
    "a global rule": (by_rule, lambda n: rebind("window", SlidingWindow(n)), 2, 6),
    "a global of an inner function": (by_inner_function, lambda n: rebind("factor", n), 2, 3),
    "a global of a method": (ByGlobal(), lambda n: rebind("factor", n), 2, 6),
    "an attribute of the class": (ByClass(), lambda n: setattr(ByClass, "width", n), 2, 6),
    "an attribute of a module": (module, lambda n: setattr(module, "width", n), 2, 6),
    "a constant of a module": (by_module, lambda n: setattr(settings_file, "width", n), 2, 6),
    "an environment variable": (by_environment, lambda n: os.environ.update(WIDTH=str(n)), 2, 6),
    "a constant by getattr": (ByGetattr(), lambda n: setattr(ByGetattr, "width", n), 2, 6),
    "a slot": (by_slot, lambda n: setattr(slotted, "width", n), 2, 6),
    "a constant of a class": (by_constant, lambda n: setattr(Constants, "width", n), 2, 6),
    "a global behind a property": (by_property, lambda n: rebind("factor", n), 2, 6),
    "an array": (by_array, lambda n: array.fill(n), 2, 6),
    "a key": (by_key, lambda n: (named.clear(), named.update({n: 0})), "causal", "anti"),
    "a grouping": (by_group, lambda n: groups.__setitem__(slice(None), n), [[1, 2], [3]],
                   [[1], [2, 3]]),
    "a closed over set": (by_set(some), lambda n: (some.clear(), some.update(n)), {1, 2}, {5, 6}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    rule, change, before, after = CHANGES[name]
    tensors = qkv()
    try:
        change(before)
        for _ in range(3):
            right(tensors, rule=rule)
            fs.attention(*tensors, rule=rule, return_lse=True)
        change(after)
        outs = [fs.attention(*tensors, rule=rule) for _ in range(5)]
        true = fs.reference(*tensors, rule=rule).out
        for out in outs:
            torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)
    finally:
        change(before)


def whole(seen: bool) -> Tensor:
    return torch.full((8,), seen)


def test_an_in_place_change_in_inference_mode_is_seen() -> None:
    rule = Causal()
    with torch.inference_mode():
        tensors, offset = qkv(), torch.tensor([0])
        for n in (0, 3, -2):
            offset.fill_(n)
            for _ in range(4):
                out = fs.attention(*tensors, rule=rule, q_offset=offset)
            true = fs.reference(*tensors, rule=rule, q_offset=offset).out
            torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


def test_an_in_place_change_of_a_keyword_is_seen() -> None:
    tensors, seen = qkv(), whole(True)
    rule = fs.MaskRule.of(lambda b, h, q, kv, *, own=seen: own[kv])
    for _ in range(4):
        fs.attention(*tensors, rule=rule)
    seen.copy_(torch.arange(8) < 3)
    outs = [fs.attention(*tensors, rule=rule) for _ in range(4)]
    for out in outs:
        true = fs.reference(*tensors, rule=rule).out
        torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


def test_a_table_with_new_memory_is_seen() -> None:
    tensors, seen = qkv(), whole(True)
    rule = fs.MaskRule.of(lambda b, h, q, kv: seen[kv])
    for _ in range(4):
        fs.attention(*tensors, rule=rule)
    seen.data = torch.arange(8) < 3
    outs = [fs.attention(*tensors, rule=rule) for _ in range(4)]
    true = fs.reference(*tensors, rule=rule).out
    for out in outs:
        torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


def test_a_number_in_place_of_an_equal_one() -> None:
    tensors, cells = qkv(), {"limit": torch.tensor(2)}
    exec("def rule(b, h, q, kv): return (q - kv).abs() < limit", cells)
    first, second = cells["limit"], torch.tensor(2)
    fs.attention(*tensors, rule=cells["rule"])
    cells["limit"] = second
    fs.attention(*tensors, rule=cells["rule"])
    first.fill_(6)
    for _ in range(2):
        right(tensors, rule=cells["rule"])


def test_a_tensor_that_is_read_for_its_length_alone() -> None:
    tensors, tokens = qkv(), torch.zeros(3)

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < tokens.shape[0]

    for length in (3, 6, 2, 7, 5, 8):
        tokens = None
        tokens = torch.zeros(length)
        for _ in range(2):
            out = fs.attention(*tensors, rule=rule)
            true = fs.reference(*tensors, rule=rule).out
            torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"scale": True}, {"tile": 16.0}, {"q_offset": False}])
def test_an_option_is_judged_although_an_equal_one_was_accepted(wrong: dict[str, Any]) -> None:
    tensors, rule = qkv(), Causal()
    accepted = {"scale": 1, "tile": 16, "q_offset": 0}
    for _ in range(4):
        fs.attention(*tensors, rule=rule, **accepted)
    for _ in range(4):
        with pytest.raises(fs.FlexSparseError, match=next(iter(wrong))):
            fs.attention(*tensors, rule=rule, **{**accepted, **wrong})


# Copies


COPIES: dict[str, Callable[[], Any]] = {
    "rule": lambda: Causal() & ~SlidingWindow(3),
    "document": lambda: Document(torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])),
    "parameter": lambda: Near(torch.nn.Parameter(torch.tensor(2.5))),
    "score": lambda: Softcap(3.0) >> Alibi(torch.ones(2)),
    "selection": lambda: chosen(),
    "selector": lambda: Quest(block=2, keep=2, q_block=2),
    "grid": lambda: fs.Grid(8, 8, q_offset=torch.tensor([2])),
    "partial": lambda: fs.reference(*qkv()),
    "budget": lambda: fs.build_layout(rule=Causal(), grid=fs.Grid(8, 8), heads=(2, 2)).budget(),
}
MADE: dict[str, Callable[[], Any]] = {
    "plan": lambda: fs.make_plan(*qkv(), rule=Causal(), score=Softcap(3.0), select=chosen()),
    "layout": lambda: fs.build_layout(rule=Causal(), grid=fs.Grid(8, 8), heads=(2, 2)),
    "report": lambda: fs.check(*qkv(), rule=Causal()),
    "result": lambda: fs.make_plan(*qkv(), rule=Causal()).run(*qkv(), return_lse=True),
}


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def same_use(name: str, a: Any, b: Any) -> None:
    tensors = qkv()
    match name:
        case "rule" | "document" | "parameter":
            outs = [fs.attention(*tensors, rule=x) for x in (a, b)]
        case "score":
            outs = [fs.attention(*tensors, score=x) for x in (a, b)]
        case "selection" | "selector":
            outs = [fs.attention(*tensors, select=x) for x in (a, b)]
        case "plan":
            outs = [x.run(*tensors).out for x in (a, b)]
        case "layout":
            outs = [x.dense() for x in (a, b)]
        case "grid":
            outs = [x.positions() for x in (a, b)]
        case "partial" | "result":
            outs = [x.out for x in (a, b)]
        case _:
            outs = []
            assert str(a) == str(b)
    if outs:
        assert torch.equal(*outs)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickled], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str, how: Callable[[Any], Any]) -> None:
    made = COPIES[name]()
    same_use(name, made, how(made))
    used = COPIES[name]()
    same_use(name, used, made)
    same_use(name, how(used), made)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", MADE)
def test_copies_of_what_was_made(name: str, how: Callable[[Any], Any]) -> None:
    made = MADE[name]()
    same_use(name, made, how(made))


@pytest.mark.parametrize("name", MADE)
def test_what_was_made_is_pickled(name: str) -> None:
    made = MADE[name]()
    same_use(name, made, pickled(made))


# Parts


def test_merge_of_extremes() -> None:
    one = fs.Partial(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 1e4))
    none = fs.Partial(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -math.inf))
    far = fs.Partial(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -1e4))
    for parts in ([one], [one, none], [none, one], [one, far], [none, far, one, none]):
        out, lse = fs.merge(parts)
        assert out.item() == 1.0
        assert lse.item() == 1e4
    assert fs.merge([none, none]).lse.item() == -math.inf
    assert fs.merge([far, none]).lse.item() == -1e4


def test_merge_of_parts_that_saw_nothing_has_gradients_of_zero() -> None:
    def part(seen: bool) -> fs.Partial:
        lse = torch.zeros(1, 1, 2) if seen else torch.full((1, 1, 2), -math.inf)
        return fs.Partial(
            torch.full((1, 1, 2, 3), float(seen)).requires_grad_(), lse.requires_grad_()
        )

    for pair in ((True, False), (False, False), (True, True)):
        parts = [part(seen) for seen in pair]
        out, lse = fs.merge(parts)
        loss = out.sum() + torch.where(lse == -math.inf, 0, lse).sum()
        for grad in torch.autograd.grad(loss, [x for p in parts for x in p]):
            assert grad.isfinite().all()


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    cuts=st.lists(st.integers(0, 24), max_size=4),
    lists=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_any_cut_of_the_keys_merges(cuts: list[int], lists: int, seed: int) -> None:
    lengths = (8, 24)
    tensors = qkv(2, (4, 2), lengths, seed=seed)
    select = chosen(2, lists, lengths, keep=4, seed=seed, holes=0.3)
    edges = [0, *sorted(cuts), 24]
    parts = []
    for low, high in pairwise(edges):
        rule = fs.MaskRule.of(
            lambda b, h, q, kv, low=low, high=high: (kv >= low) & (kv < high) & (q >= kv)
        )
        plan = fs.make_plan(*tensors, rule=rule, select=select, tile=16)
        parts.append(plan.run(*tensors, return_lse=True).partial)
    merged = fs.merge(parts)
    true = fs.reference(*tensors, rule=Causal(), select=select)
    torch.testing.assert_close(merged.out.double(), true.out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(merged.lse.double(), true.lse, atol=2e-5, rtol=2e-5)


# Anything at all


@st.composite
def calls(draw: st.DrawFn) -> tuple[Triple, dict[str, Any]]:
    batch, groups, group = (draw(st.sampled_from(x)) for x in ([1, 2, 3], [1, 2], [1, 2, 5]))
    lengths = (
        draw(st.sampled_from([1, 2, 16, 17, 33, 70])),
        draw(st.sampled_from([1, 3, 16, 31, 49, 64, 130])),
    )
    dims = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 5, 8]))
    seed = draw(st.integers(0, 9999))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    how = draw(st.sampled_from([None, *STRIDES]))
    tensors = qkv(batch, (groups * group, groups), lengths, dims, dtype, seed)
    q, k, v = tensors if how is None else tuple(seen_as(x, how) for x in tensors)
    random = torch.Generator().manual_seed(seed)
    whole = 3 * sum(lengths) + 10
    documents = torch.randint(0, 3, (batch, whole), generator=random).sort(-1).values
    flags = torch.rand(groups * group, whole, generator=random) < 0.6
    rules = [
        None, Causal(), ~Causal(), SlidingWindow(draw(st.sampled_from([1, 3, 20]))),
        PrefixLM(torch.randint(0, 8, (batch,), generator=random)),
        Causal() & (SlidingWindow(4) | AttentionSink(2)),
        RightPadding(torch.randint(0, lengths[1] + 1, (batch,), generator=random)),
        LeftPadding(torch.randint(0, lengths[1] + 1, (batch,), generator=random)),
        lambda b, h, q, kv: flags[h, kv] & (documents[b, kv] >= 1),
        lambda b, h, q, kv: (h % 2 == 0) & (q >= kv),
        lambda b, h, q, kv: (q + kv) % 3 == b % 3,
        lambda b, h, q, kv: b == 1,
    ]  # fmt: skip
    offsets = [
        None, 0, -3, 5, lengths[1] + 3, torch.tensor(2),
        torch.randint(-lengths[0], lengths[1] + 3, (batch,), generator=random),
    ]  # fmt: skip
    slopes = torch.randn(groups * group, generator=random, dtype=dtype, requires_grad=True)
    scores = [
        None, Softcap(2.0), Alibi(slopes), Softcap(2.0) >> Alibi(slopes),
        lambda s, b, h, q, kv: torch.where(kv % 2 == 0, s, -math.inf),
        lambda s, b, h, q, kv: slopes[h] * (kv - q) / 10,
    ]  # fmt: skip
    options: dict[str, Any] = {
        "rule": draw(st.sampled_from(rules)),
        "q_offset": draw(st.sampled_from(offsets)),
        "score": draw(st.sampled_from(scores)),
        "scale": draw(st.sampled_from([None, None, 0.0, -1.0, 2.0])),
        "sink": draw(st.sampled_from([None, None, slopes.detach() * 2])),
        "tile": draw(st.sampled_from([16, 17, 32, (16, 32), (64, 16), 128])),
        "sanitize": draw(st.booleans()),
    }
    if draw(st.integers(0, 3)):
        blocks = draw(st.tuples(*[st.sampled_from([1, 4, 17, 32, 64, 100])] * 2))
        lists = draw(st.sampled_from([1, groups, groups * group]))
        keep, own = draw(st.sampled_from([0, 1, 3, 40])), draw(st.sampled_from([1, batch]))
        options["select"] = chosen(own, lists, lengths, keep, blocks, seed, holes=0.3)
        options["fallback"] = draw(st.sampled_from([None, "self", ("local", 3), ("local", 500)]))
    if how is None:
        by_query_head = "select" in options and options["select"].heads > groups
        ways = [None, "fold", "identity", None if by_query_head else "pack"]
        options["pack"] = draw(st.sampled_from(ways))
    return (q, k, v), options


@settings(deadline=None, derandomize=True, max_examples=60)
@given(call=calls())
def test_any_call_is_the_reference(call: tuple[Triple, dict[str, Any]]) -> None:
    tensors, options = call
    right(tensors, loose=1e-4, **options)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(call=calls())
def test_any_layout_is_rule_and_selection(call: tuple[Triple, dict[str, Any]]) -> None:
    (q, k, _), options = call
    grid = fs.Grid(q.shape[2], k.shape[2], q_offset=options["q_offset"], batch=q.shape[0])
    wanted = {n: options.get(n) for n in ("rule", "select", "fallback")}
    layout = fs.build_layout(
        **wanted, grid=grid, heads=(q.shape[1], k.shape[1]), block_size=options["tile"]
    )
    from flexsparse.reference import allowed

    true = allowed(grid, q.shape[1], **wanted, rows=torch.arange(grid.q_len))
    assert torch.equal(layout.dense(), true)
    assert layout.budget().logical_pairs == int(true.sum())
    mod = layout.block_mask.mask_mod
    at = [torch.arange(n) for n in (q.shape[0], q.shape[1], grid.q_len, grid.kv_len)]
    pairs = mod(*(x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(at)))
    assert torch.equal(pairs.expand_as(true), true)
