"""The gallery's first rules and scores against definitions written pair by pair; its examples run."""

from __future__ import annotations

import doctest
import pkgutil
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from oracle import (
    BATCH,
    HEADS,
    SIZES,
    Pair,
    dense,
    indices,
    pairs_of,
    random_tensors,
)
from torch import Tensor

import flexsparse as fs
import flexsparse.masks
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

Make = Callable[[int], tuple[fs.MaskRule, Pair]]


# Doctests


MASK_MODULES = [m.name for m in pkgutil.iter_modules(flexsparse.masks.__path__)]
MODULES = [
    m.name
    for m in pkgutil.walk_packages(fs.__path__, "flexsparse.")
    if not m.name.startswith(("flexsparse.samples", "flexsparse.masks.", "flexsparse.__main__"))
]


@pytest.mark.parametrize("name", MASK_MODULES)
def test_each_gallery_file_shows_an_example_that_runs(name: str) -> None:
    """A reader learns a rule from its picture; the picture must be true."""
    found = doctest.testmod(import_module(f"flexsparse.masks.{name}"))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    """What a docstring shows is what happens."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("flexsparse"):
            raise
        pytest.skip(f"{name} needs {missing.name}")
    assert doctest.testmod(module).failed == 0


def test_the_gallery_exports_what_its_files_define() -> None:
    """Every rule and score of the gallery is importable from its top, under its own name."""
    for name in MASK_MODULES:
        module = import_module(f"flexsparse.masks.{name}")
        own = [
            x
            for x in vars(module).values()
            if isinstance(x, type) and x.__module__ == module.__name__
        ]
        assert own, name
        for kind in own:
            assert getattr(flexsparse.masks, kind.__name__) is kind
            assert kind.__name__ in flexsparse.masks.__all__


# Rules, pair by pair


def causal(size: int) -> tuple[fs.MaskRule, Pair]:
    return Causal(), lambda b, h, i, j: j <= i


def window(width: Callable[[int], int]) -> Make:
    def make(size: int) -> tuple[fs.MaskRule, Pair]:
        w = width(size)
        return SlidingWindow(w), lambda b, h, i, j: i - w < j <= i

    return make


def sink(size: int) -> tuple[fs.MaskRule, Pair]:
    return AttentionSink(4), lambda b, h, i, j: j in (0, 1, 2, 3)


def shared_documents(dtype: torch.dtype) -> Make:
    def make(size: int) -> tuple[fs.MaskRule, Pair]:
        ids = [(i // 5) % 3 - (i % 11 == 0) for i in range(size)]
        ids = [max(d, -1) for d in ids]
        rule = Document(torch.tensor(ids, dtype=dtype))
        return rule, lambda b, h, i, j: ids[i] == ids[j] != -1

    return make


def own_documents(size: int) -> tuple[fs.MaskRule, Pair]:
    ids = [[-1 if i >= size - b else i // (4 + 13 * b) for i in range(size)] for b in range(BATCH)]
    return Document(torch.tensor(ids)), lambda b, h, i, j: ids[b][i] == ids[b][j] != -1


def prefix(length: Callable[[int], int], tensor: bool) -> Make:
    def make(size: int) -> tuple[fs.MaskRule, Pair]:
        n = length(size)
        return PrefixLM(torch.tensor(n) if tensor else n), lambda b, h, i, j: j < n or j <= i

    return make


def own_prefixes(dtype: torch.dtype) -> Make:
    def make(size: int) -> tuple[fs.MaskRule, Pair]:
        n = [0, 1, size]
        return PrefixLM(torch.tensor(n, dtype=dtype)), lambda b, h, i, j: j < n[b] or j <= i

    return make


def left_padding(dtype: torch.dtype) -> Make:
    def make(size: int) -> tuple[fs.MaskRule, Pair]:
        n = [0, size // 2, size]
        rule = LeftPadding(torch.tensor(n, dtype=dtype))
        return rule, lambda b, h, i, j: i >= n[b] and j >= n[b]

    return make


def right_padding(dtype: torch.dtype) -> Make:
    def make(size: int) -> tuple[fs.MaskRule, Pair]:
        n = [size, (size + 1) // 2, 0]
        rule = RightPadding(torch.tensor(n, dtype=dtype))
        return rule, lambda b, h, i, j: i < n[b] and j < n[b]

    return make


def streaming(size: int) -> tuple[fs.MaskRule, Pair]:
    rule = Causal() & (SlidingWindow(6) | AttentionSink(2))
    return rule, lambda b, h, i, j: j <= i and (i - j < 6 or j < 2)


def padded_documents(size: int) -> tuple[fs.MaskRule, Pair]:
    documents, in_document = own_documents(size)
    padding, kept = right_padding(torch.int64)(size)
    rule = documents & padding & ~SlidingWindow(2)
    return (
        rule,
        lambda b, h, i, j: in_document(b, h, i, j) and kept(b, h, i, j) and not 0 <= i - j < 2,
    )


RULES: dict[str, Make] = {
    "causal": causal,
    "window-1": window(lambda size: 1),
    "window-5": window(lambda size: 5),
    "window-64": window(lambda size: 64),
    "window-whole": window(lambda size: size),
    "window-beyond": window(lambda size: size + 3),
    "attention-sink": sink,
    "documents": shared_documents(torch.int64),
    "documents-int32": shared_documents(torch.int32),
    "documents-per-batch": own_documents,
    "prefix-0": prefix(lambda size: 0, False),
    "prefix-1": prefix(lambda size: 1, False),
    "prefix-3": prefix(lambda size: 3, False),
    "prefix-whole": prefix(lambda size: size, False),
    "prefix-tensor": prefix(lambda size: size // 2, True),
    "prefix-per-batch": own_prefixes(torch.int64),
    "prefix-per-batch-int32": own_prefixes(torch.int32),
    "left-padding": left_padding(torch.int64),
    "left-padding-int32": left_padding(torch.int32),
    "right-padding": right_padding(torch.int64),
    "right-padding-int32": right_padding(torch.int32),
    "streaming": streaming,
    "padded-documents": padded_documents,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_definition_pair_by_pair(name: str, size: int) -> None:
    """Called on indices, and read back from the tiles, a rule allows what its definition allows."""
    rule, defined = RULES[name](size)
    called = rule(*indices(size)).expand(BATCH, HEADS, size, size).tolist()
    grid = fs.Grid(size, size, batch=BATCH)
    layout = fs.build_layout(rule=rule, grid=grid, heads=(HEADS, 2), block_size=(32, 16))
    tiled = layout.dense().expand(BATCH, HEADS, size, size).tolist()
    for i, j in pairs_of(size):
        for b in range(BATCH):
            wanted = bool(defined(b, 1, i, j))
            assert called[b][1][i][j] is wanted, (b, i, j)
            assert tiled[b][1][i][j] is wanted, (b, i, j)


@pytest.mark.parametrize("size", [7, 65])
@pytest.mark.parametrize("name", RULES)
def test_attention_under_a_rule_is_dense_attention_under_its_definition(
    name: str, size: int
) -> None:
    """Padding rows, padding keys and ragged ends included."""
    rule, defined = RULES[name](size)
    q, k, v = random_tensors(size, size, kv_heads=2)
    seen = torch.tensor(
        [[[[defined(b, 0, i, j) for j in range(size)] for i in range(size)]] for b in range(BATCH)]
    )
    out, lse = dense(q, k, v, seen)
    got, got_lse = fs.attention(q, k, v, rule=rule, tile=32, return_lse=True)
    torch.testing.assert_close(got.double(), out, atol=2e-6, rtol=0)
    torch.testing.assert_close(got_lse.double(), lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_made_and_used_in_inference_mode(name: str) -> None:
    """Serving code runs under torch.inference_mode: rules and their tensors are made there too."""
    q, k, v = random_tensors(65, 65, kv_heads=2)
    with torch.inference_mode():
        rule, defined = RULES[name](65)
        out = fs.attention(q, k, v, rule=rule, tile=32)
    seen = torch.tensor(
        [[[[defined(b, 0, i, j) for j in range(65)] for i in range(65)]] for b in range(BATCH)]
    )
    torch.testing.assert_close(out.double(), dense(q, k, v, seen)[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("offset", [None, 0, 64, -3])
@pytest.mark.parametrize("name", ["causal", "window-5", "prefix-per-batch", "streaming"])
def test_a_rule_speaks_of_positions_wherever_the_queries_stand(
    name: str, offset: int | None
) -> None:
    """Fewer queries than keys: the call's offset says which positions they have."""
    rule, defined = RULES[name](65)
    q, k, v = random_tensors(9, 65)
    first = 65 - 9 if offset is None else offset
    seen = torch.tensor(
        [
            [[[defined(b, 0, first + i, j) for j in range(65)] for i in range(9)]]
            for b in range(BATCH)
        ]
    )
    got = fs.attention(q, k, v, rule=rule, q_offset=offset)
    torch.testing.assert_close(got.double(), dense(q, k, v, seen)[0], atol=2e-6, rtol=0)


def test_a_rule_speaks_of_positions_that_differ_by_sequence() -> None:
    """Decoding a batch whose sequences have different lengths."""
    q, k, v = random_tensors(2, 65)
    offset = [10, 63, -1]
    seen = torch.tensor(
        [
            [[[offset[b] + i - 5 < j <= offset[b] + i for j in range(65)] for i in range(2)]]
            for b in range(3)
        ]
    )
    got = fs.attention(q, k, v, rule=SlidingWindow(5), q_offset=torch.tensor(offset))
    torch.testing.assert_close(got.double(), dense(q, k, v, seen)[0], atol=2e-6, rtol=0)


# Scores


def alibi_formula(slopes: Tensor) -> Callable[[Tensor], Tensor]:
    def change(scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        at = torch.arange(size)
        distance = at[None, :] - torch.arange(size - scores.shape[-2], size)[:, None]
        return scores + slopes.double()[None, :, None, None] * distance

    return change


def bias_formula(bias: Tensor) -> Callable[[Tensor], Tensor]:
    def change(scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        behind = torch.arange(size - scores.shape[-2], size)[:, None] - torch.arange(size)[None, :]
        behind = behind.clip(0, bias.shape[1] - 1)
        return scores + bias.double()[:, behind][None]

    return change


def softcap_formula(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda scores: cap * torch.tanh(scores / cap)


ScoreCase = tuple[fs.ScoreRule, Callable[[Tensor], Tensor], list[Tensor]]


def score_case(name: str) -> ScoreCase:
    draw = torch.Generator().manual_seed(3)
    slopes = torch.rand(HEADS, generator=draw).requires_grad_()
    bias = torch.randn(HEADS, 12, generator=draw).requires_grad_()
    cases: dict[str, ScoreCase] = {
        "alibi": (Alibi(slopes), alibi_formula(slopes), [slopes]),
        "alibi-paper": (
            Alibi.of_heads(HEADS),
            alibi_formula(torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])),
            [],
        ),
        "head-bias": (HeadBias(bias), bias_formula(bias), [bias]),
        "softcap": (Softcap(0.7), softcap_formula(0.7), []),
        "alibi-then-softcap": (
            Alibi(slopes) >> Softcap(2.0),
            lambda s: softcap_formula(2.0)(alibi_formula(slopes)(s)),
            [slopes],
        ),
        "softcap-then-bias-then-alibi": (
            Softcap(2.0) >> HeadBias(bias) >> Alibi(slopes),
            lambda s: alibi_formula(slopes)(bias_formula(bias)(softcap_formula(2.0)(s))),
            [bias, slopes],
        ),
    }
    return cases[name]


SCORES = [
    "alibi",
    "alibi-paper",
    "head-bias",
    "softcap",
    "alibi-then-softcap",
    "softcap-then-bias-then-alibi",
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_and_its_gradients_are_those_of_its_formula(name: str, size: int) -> None:
    """out, lse, the gradients of q, k and v, and of every learned tensor, against autograd."""
    score, formula, learned = score_case(name)
    inputs = [x.requires_grad_() for x in random_tensors(size, size, kv_heads=2)]
    at = torch.arange(size)
    seen = (at[:, None] >= at[None, :])[None, None]
    weight = torch.randn(BATCH, HEADS, size, 16, generator=torch.Generator().manual_seed(1))
    out, lse = fs.attention(*inputs, rule=Causal(), score=score, tile=32, return_lse=True)
    got = torch.autograd.grad((out * weight).sum() + lse.sum(), [*inputs, *learned])
    true_out, true_lse = dense(*inputs, seen, formula)
    wanted = torch.autograd.grad(
        (true_out * weight).sum() + true_lse.sum(), [*inputs, *learned], allow_unused=True
    )
    torch.testing.assert_close(out.double(), true_out, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-5, rtol=0)
    for have, want in zip(got, wanted, strict=True):
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(have, want, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_knows_where_a_few_queries_stand(name: str) -> None:
    """Distances count from the query's position, not from its row in the tensor."""
    score, formula, _ = score_case(name)
    q, k, v = random_tensors(5, 40)
    seen = torch.arange(40)[None, :] <= torch.arange(35, 40)[:, None]
    out = fs.attention(q, k, v, rule=Causal(), score=score)
    torch.testing.assert_close(out.double(), dense(q, k, v, seen, formula)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_made_and_used_in_inference_mode(name: str) -> None:
    """Learned tables are served as they are."""
    q, k, v = random_tensors(64, 64)
    with torch.inference_mode():
        score, formula, _ = score_case(name)
        got = fs.attention(q, k, v, rule=Causal(), score=score, tile=32)
        want = dense(q, k, v, torch.ones(64, 64, dtype=torch.bool).tril(), formula)[0]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
