"""The gallery against definitions written pair by pair, and FlexAttention's own functions as they are."""

from __future__ import annotations

import doctest
import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from oracle import (
    BATCH,
    HEADS,
    SIZES,
    Pair,
    defined_pairs,
    dense,
    indices,
    pairs_of,
    random_tensors,
)
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

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


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SlidingWindow(0),
        lambda: SlidingWindow(-1),
        lambda: AttentionSink(0),
        lambda: PrefixLM(-1),
        lambda: PrefixLM(torch.zeros(2, 2, dtype=torch.int64)),
        lambda: PrefixLM(torch.zeros(2)),
        lambda: Document(torch.zeros(4)),
        lambda: Document(torch.zeros(1, 1, 4, dtype=torch.int64)),
        lambda: Document([0, 0, 1]),
        lambda: LeftPadding(torch.tensor(3)),
        lambda: LeftPadding(torch.tensor([1.0])),
        lambda: LeftPadding(3),
        lambda: RightPadding(torch.tensor(3)),
        lambda: RightPadding(torch.tensor([1.0])),
        lambda: RightPadding([3]),
        lambda: Alibi([0.5]),
        lambda: Alibi(torch.tensor([1, 2])),
        lambda: Alibi(torch.zeros(2, 2)),
        lambda: HeadBias(torch.zeros(4)),
        lambda: HeadBias(torch.zeros(4, 4, dtype=torch.int64)),
        lambda: Softcap(0.0),
        lambda: Softcap(-1.0),
        lambda: Softcap(float("nan")),
    ],
)
def test_a_wrong_parameter_is_refused_with_the_rules_name(wrong: Callable[[], object]) -> None:
    """Not deep inside a kernel, and not silently."""
    names = "|".join(flexsparse.masks.__all__)
    with pytest.raises(fs.FlexSparseError, match=names):
        wrong()


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


# What people already have


def sliding_window_factory(window_size: int) -> Callable[..., Tensor]:
    def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window_size)

    sliding_window.__name__ = f"sliding_window_{window_size}"
    return sliding_window


def dilated_factory(window_size: int, dilation: int) -> Callable[..., Tensor]:
    def dilated(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        diff = torch.abs(q_idx - kv_idx)
        return (diff <= window_size) & ((diff % dilation) == 0)

    return dilated


def natten_factory(
    canvas_w: int, canvas_h: int, kernel_w: int, kernel_h: int
) -> Callable[..., Tensor]:
    def get_x_y(idx: Tensor) -> tuple[Tensor, Tensor]:
        return idx // canvas_w, idx % canvas_w

    def natten(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        kernel_x = q_x.clamp(kernel_w // 2, (canvas_w - 1) - kernel_w // 2)
        kernel_y = q_y.clamp(kernel_h // 2, (canvas_h - 1) - kernel_h // 2)
        hori = (kernel_x - kv_x).abs() <= kernel_w // 2
        vert = (kernel_y - kv_y).abs() <= kernel_h // 2
        return hori & vert

    return natten


def packed_factory(inner: Callable[..., Tensor], offsets: Tensor) -> Callable[..., Tensor]:
    counts = offsets[1:] - offsets[:-1]
    document = torch.repeat_interleave(torch.arange(len(counts)), counts)

    def packed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = document[q_idx] == document[kv_idx]
        q_logical = q_idx - offsets[document[q_idx]]
        kv_logical = kv_idx - offsets[document[kv_idx]]
        return same & inner(b, h, q_logical, kv_logical)

    return packed


def causal_function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def banded(width: int, shift: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q + shift[h] - kv).abs() < width


class Strided:
    """A callable object that is no dataclass."""

    def __init__(self, stride: int) -> None:
        self.stride = stride

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx) % self.stride == 0)


@dataclass
class PerHead:
    """A callable object that is a dataclass, but no MaskRule."""

    width: Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.width[h]


class Blocked:
    """A bound method as a mask_mod."""

    def __init__(self, block: int) -> None:
        self.block = block

    def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // self.block == kv_idx // self.block


WIDTHS = [3, 1, 9, 5]
NOTEBOOK_WIDTH = 6

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Pair]] = {
    "function": (causal_function, lambda b, h, i, j: i >= j),
    "lambda": (lambda b, h, q, kv: (q - kv).abs() < 4, lambda b, h, i, j: abs(i - j) < 4),
    "lambda-global": (
        lambda b, h, q, kv: (q - kv).abs() < NOTEBOOK_WIDTH,
        lambda b, h, i, j: abs(i - j) < 6,
    ),
    "lambda-batch-and-head": (
        lambda b, h, q, kv: (q + b * 2) % 5 >= (kv + h) % 3,
        lambda b, h, i, j: (i + b * 2) % 5 >= (j + h) % 3,
    ),
    "window-factory": (sliding_window_factory(6), lambda b, h, i, j: 0 <= i - j <= 6),
    "dilated-factory": (
        dilated_factory(12, 3),
        lambda b, h, i, j: abs(i - j) <= 12 and abs(i - j) % 3 == 0,
    ),
    "natten-factory": (
        natten_factory(8, 8, 3, 5),
        lambda b, h, i, j: (
            abs(min(max(i // 8, 1), 6) - j // 8) <= 1 and abs(min(max(i % 8, 2), 5) - j % 8) <= 2
        ),
    ),
    "packed-factory": (
        packed_factory(sliding_window_factory(3), torch.tensor([0, 10, 33, 64])),
        lambda b, h, i, j: [i >= 10, i >= 33] == [j >= 10, j >= 33] and 0 <= i - j <= 3,
    ),
    "partial": (
        functools.partial(banded, 4, torch.tensor([0, 2, -1, 5])),
        lambda b, h, i, j: abs(i + [0, 2, -1, 5][h] - j) < 4,
    ),
    "partial-keyword": (
        functools.partial(lambda b, h, q, kv, *, width: (q - kv).abs() < width, width=7),
        lambda b, h, i, j: abs(i - j) < 7,
    ),
    "default-argument": (
        lambda b, h, q, kv, width=5: (q - kv).abs() < width,
        lambda b, h, i, j: abs(i - j) < 5,
    ),
    "object": (Strided(4), lambda b, h, i, j: i >= j and (i - j) % 4 == 0),
    "dataclass": (PerHead(torch.tensor(WIDTHS)), lambda b, h, i, j: abs(i - j) < WIDTHS[h]),
    "method": (Blocked(16).mask, lambda b, h, i, j: i // 16 == j // 16),
    "and_masks": (
        and_masks(causal_function, sliding_window_factory(5)),
        lambda b, h, i, j: 0 <= i - j <= 5,
    ),
    "or_masks": (
        or_masks(causal_function, lambda b, h, q, kv: kv < 9),
        lambda b, h, i, j: i >= j or j < 9,
    ),
    "noop_mask": (noop_mask, lambda b, h, i, j: True),
    "table": (
        (lambda table: lambda b, h, q, kv: table[q, kv])(
            torch.arange(64)[:, None] % 7 > torch.arange(64)[None, :] % 5
        ),
        lambda b, h, i, j: i % 7 > j % 5,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unmodified_mask_mod_is_a_rule(name: str) -> None:
    """Functions, closures, partials and objects written for FlexAttention work as they are."""
    mod, pair = FUNCTIONS[name]
    q, k, v = random_tensors(64, 64, kv_heads=2)
    out, lse = dense(q, k, v, defined_pairs(pair, 64))
    got, got_lse = fs.attention(q, k, v, rule=mod, tile=32, return_lse=True)
    torch.testing.assert_close(got.double(), out, atol=2e-6, rtol=0)
    torch.testing.assert_close(got_lse.double(), lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unmodified_mask_mod_is_a_rule_in_inference_mode(name: str) -> None:
    """The same where models are served."""
    mod, pair = FUNCTIONS[name]
    q, k, v = random_tensors(64, 64)
    with torch.inference_mode():
        rule = ~(~fs.MaskRule.of(mod) | ~Causal())
        got = fs.attention(q, k, v, rule=rule, tile=32)
    seen = defined_pairs(lambda b, h, i, j: pair(b, h, i, j) and j <= i, 64)
    torch.testing.assert_close(got.double(), dense(q, k, v, seen)[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unmodified_mask_mod_composes_with_rules(name: str) -> None:
    """A plain function may stand on either side of & and |, and wrapped under ~."""
    mod, pair = FUNCTIONS[name]
    rule = (mod & Causal()) | (~fs.MaskRule.of(mod) & AttentionSink(5)) | (SlidingWindow(2) & mod)

    def wanted(b: int, h: int, i: int, j: int) -> bool:
        return bool(pair(b, h, i, j) and j <= i) or bool(not pair(b, h, i, j) and j < 5)

    layout = fs.build_layout(
        rule=rule, grid=fs.Grid(64, 64, batch=BATCH), heads=(HEADS, 2), block_size=16
    )
    assert torch.equal(layout.dense().expand(BATCH, HEADS, 64, 64), defined_pairs(wanted, 64))


def alibi_factory(heads: int) -> Callable[..., Tensor]:
    def alibi_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * scale

    return alibi_mod


def softcap_factory(cap: int) -> Callable[..., Tensor]:
    def tanh_softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return tanh_softcap


class Tempered(torch.nn.Module):
    """A learned temperature for each head, as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = torch.nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.0]))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * torch.exp(self.logs[h])


def shifted(by: float, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + by * (q % 3) - kv * 0.01


TABLE = torch.randn(BATCH, HEADS, 64, 64, generator=torch.Generator().manual_seed(5))
AT = torch.arange(64)
LEARNED = Tempered()

SCORE_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "alibi-factory": (
        alibi_factory(HEADS),
        lambda s: (
            s
            + (AT[None, :] - AT[:, None])
            * torch.tensor([0.25, 0.0625, 2.0**-6, 2.0**-8], dtype=torch.float64)[:, None, None]
        ),
    ),
    "softcap-factory": (softcap_factory(2), lambda s: 2 * torch.tanh(s / 2)),
    "relative": (
        lambda score, b, h, q, kv: score + (q - kv) * 0.1,
        lambda s: s + (AT[:, None] - AT[None, :]) * 0.1,
    ),
    "checkerboard": (
        lambda score, b, h, q, kv: torch.where((kv - q) % 2 == 0, score * 0.5, score),
        lambda s: torch.where((AT[None, :] - AT[:, None]) % 2 == 0, s * 0.5, s),
    ),
    "masking": (
        lambda score, b, h, q, kv: torch.where(q >= kv, score, -float("inf")),
        lambda s: s.masked_fill(AT[:, None] < AT[None, :], -torch.inf),
    ),
    "bias-table": (lambda score, b, h, q, kv: score + TABLE[b, h, q, kv], lambda s: s + TABLE),
    "partial": (
        functools.partial(shifted, 0.3),
        lambda s: s + 0.3 * (AT[:, None] % 3) - AT[None, :] * 0.01,
    ),
    "module": (LEARNED, lambda s: s * LEARNED.logs.detach().double().exp()[:, None, None]),
    "ignores-the-score": (
        lambda score, b, h, q, kv: score * 0 + kv * 0.1,
        lambda s: s * 0 + AT[None, :] * 0.1,
    ),
}


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_an_unmodified_score_mod_is_a_score(name: str) -> None:
    """Alone, and on either side of >>; its gradients are those of the dense formula."""
    mod, formula = SCORE_FUNCTIONS[name]
    inputs = [x.requires_grad_() for x in random_tensors(64, 64, kv_heads=2)]
    seen = (AT[:, None] - AT[None, :]).abs() < 20
    near = fs.MaskRule.of(lambda b, h, q, kv: (q - kv).abs() < 20)
    weight = torch.randn(BATCH, HEADS, 64, 16, generator=torch.Generator().manual_seed(1))
    cap = Softcap(3.0)
    chained: list[tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = [
        (mod, formula),
        (fs.ScoreRule.of(mod), formula),
        (mod >> cap, lambda s: 3 * torch.tanh(formula(s) / 3)),
        (cap >> mod, lambda s: formula(3 * torch.tanh(s / 3))),
    ]
    for score, change in chained:
        out = fs.attention(*inputs, rule=near, score=score, tile=32)
        true = dense(*inputs, seen, change)[0]
        torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=0)
        got = torch.autograd.grad((out * weight).sum(), inputs)
        wanted = torch.autograd.grad((true * weight).sum(), inputs)
        for have, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(have, want, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_an_unmodified_score_mod_is_a_score_in_inference_mode(name: str) -> None:
    """The same where models are served."""
    mod, formula = SCORE_FUNCTIONS[name]
    q, k, v = random_tensors(64, 64)
    with torch.inference_mode():
        got = fs.attention(q, k, v, rule=Causal(), score=mod >> Softcap(3.0), tile=32)
    seen = AT[:, None] >= AT[None, :]
    want = dense(q, k, v, seen, lambda s: 3 * torch.tanh(formula(s) / 3))[0]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_made_and_used_in_inference_mode(name: str) -> None:
    """Learned tables are served as they are."""
    q, k, v = random_tensors(64, 64)
    with torch.inference_mode():
        score, formula, _ = score_case(name)
        got = fs.attention(q, k, v, rule=Causal(), score=score, tile=32)
        want = dense(q, k, v, AT[:, None] >= AT[None, :], formula)[0]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


def test_a_modules_parameters_are_learned() -> None:
    """A score that is an nn.Module trains like any other module."""
    module = Tempered()
    q, k, v = random_tensors(40, 40)
    out = fs.attention(q, k, v, score=module)
    out.square().sum().backward()
    logs = module.logs.detach().double().requires_grad_()
    seen = torch.ones(40, 40, dtype=torch.bool)
    true, _ = dense(q, k, v, seen, lambda s: s * logs.exp()[:, None, None])
    true.square().sum().backward()
    torch.testing.assert_close(module.logs.grad.double(), logs.grad, atol=1e-4, rtol=0)
