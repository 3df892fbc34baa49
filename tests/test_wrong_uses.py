"""Wrong uses: each is refused in a sentence that names what was given and what to do, before any compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexsparse as fs
from flexsparse.device import compiles
from flexsparse.errors import (
    ArgumentError,
    BackendError,
    EmptyRowError,
    LayoutError,
    RuleError,
    SelectionError,
    ShapeError,
)
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
from flexsparse.selectors import Quest

B, HQ, HKV, Q, S, D = 2, 4, 2, 8, 16, 16

q = torch.randn(B, HQ, Q, D, generator=torch.Generator().manual_seed(0))
k = torch.randn(B, HKV, S, D, generator=torch.Generator().manual_seed(1))
v = torch.randn(B, HKV, S, D, generator=torch.Generator().manual_seed(2))
learned = q.clone().requires_grad_()

document = torch.zeros(S, dtype=torch.int64)
table = torch.zeros(S, S, dtype=torch.bool)
top = torch.zeros(S, 4, dtype=torch.int64)
limit = torch.tensor(3)
counter = torch.zeros((), dtype=torch.int64)
numbers = [1] * S


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def chosen(
    batch: int = 1, heads: int = 1, q_len: int = Q, kv_len: int = S, q_block: int = 1
) -> fs.Selection:
    indices = torch.arange(4).expand(batch, heads, math.ceil(q_len / q_block), 4)
    return fs.Selection.from_indices(indices, kv_len=kv_len, q_len=q_len, q_block=q_block)


def given(indices: Any, **lengths: Any) -> fs.Selection:
    return fs.Selection.from_indices(indices, **{"kv_len": S, "q_len": Q, **lengths})


def attend(**options: Any) -> Any:
    return fs.attention(q, k, v, **options)


def layout(**options: Any) -> fs.Layout:
    return fs.build_layout(**{"grid": fs.Grid(Q, S), "heads": (HQ, HKV), **options})


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wrong use is refused before torch.compile hears of it."""

    def compile(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a wrong use reached torch.compile")

    monkeypatch.setattr(torch, "compile", compile)
    before = int(compiles)
    yield
    assert int(compiles) == before


def refused(use: Callable[[], Any], error: type[fs.FlexSparseError], *words: str) -> str:
    with pytest.raises(fs.FlexSparseError) as caught:
        use()
    message = str(caught.value)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {message}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message, message
    assert message.count(". ") <= 1, f"more than two sentences: {message}"
    assert len(message) < 600, message
    return message


# Rules that no kernel can run. Each stands on lines of its own, so that the error can quote them.


def branches(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    if q_idx >= kv_idx:
        return kv_idx >= 0
    return kv_idx < 4


def joined_by_and(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) and (kv_idx < 3)


def joined_by_or(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) or (kv_idx < 3)


def negated_by_not(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return not (q_idx >= kv_idx)


def chained(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
    return 0 <= q_idx - kv_idx < 4


def builtin_max(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return max(q_idx, kv_idx) < 5


def builtin_min(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return min(q_idx, kv_idx) < 5


def builtin_any(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return any(kv_idx == i for i in (1, 2))


def builtin_all(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return all([q_idx >= kv_idx, kv_idx > 2])


def builtin_sorted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return sorted([q_idx, kv_idx])[0] == q_idx


def in_a_list(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return kv_idx in [1, 2]


def in_a_tensor(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return kv_idx in document


def conditional(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx > 3 if q_idx > kv_idx else kv_idx > 3


def loops_while(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    while q_idx < kv_idx:
        q_idx = q_idx + 1
    return q_idx == kv_idx


def asserts(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    assert q_idx >= 0
    return q_idx >= kv_idx


BRANCHES = [
    branches, joined_by_and, joined_by_or, negated_by_not, chained, builtin_max, builtin_min,
    builtin_any, builtin_all, builtin_sorted, in_a_list, in_a_tensor, conditional, loops_while,
    asserts,
]  # fmt: skip


def item_of_captured(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < limit.item()


def item_of_index(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < q_idx.item()


def int_of_index(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < int(q_idx)


def float_of_index(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < float(q_idx)


def list_lookup(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return numbers[q_idx] == kv_idx


def ranges(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < len(range(q_idx))


def to_a_list(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < document.tolist()[0]


def to_numpy(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < document.numpy()[0]


def math_of_index(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < math.sqrt(q_idx)


VALUES = [
    item_of_captured, item_of_index, int_of_index, float_of_index, list_lookup, ranges, to_a_list,
    to_numpy, math_of_index,
]  # fmt: skip


def reduced(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx == kv_idx).any()


def is_in(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.isin(kv_idx, document)


def nonzero(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return document.nonzero()[0, 0] < kv_idx


def summed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return document.sum() < kv_idx


def cumulated(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return document.cumsum(0)[kv_idx] == q_idx


def multiplied(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx @ kv_idx) < 3


REDUCES = [reduced, is_in, nonzero, summed, cumulated, multiplied]


def row_of_a_list(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (top[q_idx] == kv_idx).any(-1)


def row(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return table[q_idx]


def row_then_column(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return table[q_idx][kv_idx]


def sliced(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return top[q_idx, :4].any(-1)


def column(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return table[:, kv_idx]


SLICES = [row_of_a_list, row, row_then_column, sliced, column]


def in_place(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    seen = q_idx >= kv_idx
    seen &= kv_idx < 3
    return seen


def counts(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    counter.add_(1)
    return q_idx >= kv_idx


def writes(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    document[q_idx] = 1
    return q_idx >= kv_idx


IN_PLACE = [in_place, counts, writes]


def uniform(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.rand(1) < 0.5


def uniform_like(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.rand_like(q_idx.float()) < 0.5


def coin(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.bernoulli(q_idx.float()) > 0


RANDOM = [uniform, uniform_like, coin]


def returns_float(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx).float()


def returns_int(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx).int()


def returns_true(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return True


def returns_none(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> None:
    return None


def returns_number(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> float:
    return 1.0


def returns_pair(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
    return q_idx >= kv_idx, kv_idx >= 0


RETURNS = {
    returns_float: "torch.float32",
    returns_int: "torch.int32",
    returns_true: "True (bool)",
    returns_none: "None (NoneType)",
    returns_number: "1.0 (float)",
    returns_pair: "(tuple)",
}


def compares_whole(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return document == kv_idx


def misspelled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_index  # noqa: F821


def divides_by_zero(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx * (1 / 0)


array = document.numpy()
values = document.tolist()


def reads_an_array(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return array[q_idx] == array[kv_idx]


def reads_a_list(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx < values[h]


def one_of_a_list(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx in [1, 2, 4]) | (q_idx == kv_idx)


def float_lookup(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return document[q_idx / 2] == 0


RULES = [
    *((r, ("branches in Python", "torch.where", "&")) for r in BRANCHES),
    *((r, ("asks for the value", "torch.where", "captured tensor")) for r in VALUES),
    *((r, ("reduces over an axis", "table[q_idx, kv_idx]", "Selection")) for r in REDUCES),
    *(
        (r, ("axis of it unindexed", "index every axis", "table[b, h, q_idx, kv_idx]"))
        for r in SLICES
    ),
    *((r, ("writes in place", "m = m & other")) for r in IN_PLACE),
    *((r, ("random numbers", "draw a tensor once", "index it")) for r in RANDOM),
    (compares_whole, ("captured tensor of shape [16] whole", "index it", "table[q_idx]")),
    (misspelled, ("failed at", "NameError", "kv_index")),
    (divides_by_zero, ("failed at", "ZeroDivisionError")),
    (reads_an_array, ("hands an index to numpy", "torch.from_numpy(table)")),
    (reads_a_list, ("asks for the value", "torch.tensor(values)")),
    (one_of_a_list, ("branches in Python", "(x == a) | (x == b) for x in (a, b)")),
    (float_lookup, ("failed at", "indices must be long, int")),
]


@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize(("rule", "words"), RULES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_rule_that_no_kernel_can_run(rule: Any, words: tuple[str, ...], backend: str) -> None:
    before = counter.clone(), document.clone()
    where = f"rule {rule.__name__}", "test_wrong_uses.py:"
    refused(lambda: attend(rule=rule, backend=backend), RuleError, *where, *words)
    assert torch.equal(counter, before[0])
    assert torch.equal(document, before[1])


def by_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx) % h == 0


@pytest.mark.parametrize("door", [lambda: fs.picture(by_head, 4), lambda: attend(rule=by_head)])
def test_a_division_by_zero_at_some_position_is_quoted(door: Callable[[], Any]) -> None:
    line = "`return (q_idx - kv_idx) % h == 0`"
    refused(door, RuleError, "rule by_head", "divides by zero at", line, "clamp(min=1)")


def test_a_table_of_too_few_heads_is_told_how_many_there_are() -> None:
    table = torch.ones(1, dtype=torch.bool)
    rule = fs.MaskRule.of(lambda b, h, q_idx, kv_idx: table[h])
    refused(lambda: attend(rule=rule), RuleError, f"for each of {q.shape[1]} query heads")


def test_what_a_frozen_rule_assigns_is_quoted_at_its_own_line() -> None:
    @dataclass(frozen=True, eq=False)
    class Counting(fs.MaskRule):
        n: int

        def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            self.n = 3  # type: ignore[misc]
            return q_idx >= kv_idx

    refused(lambda: Counting(2), RuleError, "test_wrong_uses.py:", "`self.n = 3")


@pytest.mark.parametrize("rule", [branches, in_place], ids=lambda r: r.__name__)
def test_the_line_at_fault_is_quoted(rule: Any) -> None:
    line = {"branches": "`if q_idx >= kv_idx:`", "in_place": "`seen &= kv_idx < 3`"}[rule.__name__]
    refused(lambda: fs.MaskRule.of(rule), RuleError, line)


@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("rule", RETURNS, ids=lambda r: r.__name__)
def test_a_rule_that_returns_something_else(rule: Any, backend: str) -> None:
    words = f"rule {rule.__name__}", "must return a bool tensor", RETURNS[rule]
    message = refused(lambda: attend(rule=rule, backend=backend), RuleError, *words)
    assert "compare, such as" in message or "such as q_idx >= kv_idx" in message


@pytest.mark.parametrize(
    "door",
    [
        lambda rule: fs.MaskRule.of(rule),
        lambda rule: Causal() & rule,
        lambda rule: rule | Causal(),
        lambda rule: attend(rule=rule),
        lambda rule: fs.make_plan(q, k, v, rule=rule),
        lambda rule: layout(rule=rule),
        lambda rule: fs.check(q, k, v, rule=rule),
        lambda rule: fs.reference(q, k, v, rule=rule),
        lambda rule: fs.picture(rule, 4),
        lambda rule: Quest().select(q, k, fs.Grid(Q, S, batch=B), rule),
    ],
    ids=["of", "and", "or", "attention", "make_plan", "build_layout", "check", "reference",
         "picture", "select"],
)  # fmt: skip
def test_every_door_refuses_the_same_rule(door: Callable[[Any], Any]) -> None:
    refused(lambda: door(branches), RuleError, "rule branches", "branches in Python", "torch.where")


@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": lambda b, h, q_idx: q_idx >= 0},
         ("rule", "must take 4 arguments (b, h, q_idx, kv_idx)", "takes 3", "(b, h, q_idx)")),
        ({"rule": lambda s, b, h, q_idx, kv_idx: q_idx >= 0},
         ("rule", "must take 4 arguments", "takes 5", "score=")),
        ({"rule": lambda b, h, q_idx, kv_idx, window, more: q_idx >= 0},
         ("rule", "must take 4 arguments", "takes 6", "window")),
        ({"score": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx},
         ("score", "must take 5 arguments", "takes 4", "rule=")),
        ({"score": lambda s: s}, ("score", "must take 5 arguments", "takes 1", "(s)")),
        ({"rule": Softcap(3.0)}, ("rule", "Softcap", "score=")),
    ],
    ids=["three", "five", "six", "four-in-score", "one-in-score", "score-in-rule"],
)  # fmt: skip
def test_arity(options: dict[str, Any], words: tuple[str, ...], backend: str) -> None:
    refused(lambda: attend(**options, backend=backend), RuleError, *words)


@dataclass(frozen=True, eq=False)
class Unwritten(fs.MaskRule):
    width: int = 1


@dataclass(frozen=True, eq=False)
class UnwrittenScore(fs.ScoreRule):
    width: int = 1


def sees_little(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx != 11) & (q_idx >= kv_idx)


block_mask = create_block_mask(
    lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, Q, S, device="cpu"
)
plan = fs.make_plan(q, k, v, rule=Causal())
other_plan = fs.make_plan(q, k, v, rule=SlidingWindow(4))
selecting_plan = fs.make_plan(q, k, v, select=chosen())
part = fs.reference(q, k, v)
low = q.bfloat16(), k.bfloat16(), v.bfloat16()

Case = tuple[str, Callable[[], Any], type[fs.FlexSparseError], tuple[str, ...]]

SLOTS: list[Case] = [
    ("mask in score", lambda: attend(score=Causal()), ArgumentError,
     ("score", "mask rule Causal()", "rule=")),
    ("mask chained", lambda: Softcap(3.0) >> Causal(), ArgumentError,
     (">>", "mask rule Causal()", "rule=")),
    ("bool from score", lambda: attend(score=lambda s, b, h, q, kv: q >= kv), RuleError,
     ("score", "must return a float tensor", "torch.bool", "rule=")),
    ("int from score", lambda: attend(score=lambda s, b, h, q, kv: q - kv), RuleError,
     ("score", "must return a float tensor", "torch.int64", "score + bias[h]")),
    ("none from score", lambda: attend(score=lambda s, b, h, q, kv: None), RuleError,
     ("score", "must return a float tensor", "None (NoneType)")),
    ("score in place", lambda: attend(score=lambda s, b, h, q, kv: s.add_(1)), RuleError,
     ("score", "writes in place")),
    ("branch in score", lambda: attend(score=lambda s, b, h, q, kv: s if q > kv else s + 1),
     RuleError, ("score", "branches in Python", "torch.where")),
    ("class as rule", lambda: attend(rule=Causal), ArgumentError,
     ("rule", "class Causal", "Causal(...)")),
    ("class as score", lambda: attend(score=Softcap), ArgumentError,
     ("score", "class Softcap", "Softcap(...)")),
    ("class joined", lambda: Causal() | SlidingWindow, ArgumentError,
     ("operand of |", "class SlidingWindow", "SlidingWindow(...)")),
    ("tensor as rule", lambda: attend(rule=torch.ones(Q, S, dtype=torch.bool)), ArgumentError,
     ("rule", "bool[8, 16]", "capture it", "mask[q, kv]")),
    ("tensor joined", lambda: torch.ones(S, dtype=torch.bool) & Causal(), ArgumentError,
     ("operand of &", "bool[16]", "capture it")),
    ("tensor as score", lambda: attend(score=torch.ones(Q, S)), ArgumentError,
     ("score", "float32[8, 16]", "capture it", "bias[h, q, kv]")),
    ("block mask as rule", lambda: attend(rule=block_mask), ArgumentError,
     ("rule", "BlockMask", "mask_mod", "Selection")),
    ("block mask as score", lambda: attend(score=block_mask), ArgumentError,
     ("score", "BlockMask", "(score, b, h, q_idx, kv_idx)")),
    ("name as rule", lambda: attend(rule="causal"), ArgumentError,
     ("rule", "(b, h, q_idx, kv_idx)", "str")),
    ("flag as rule", lambda: attend(rule=True), ArgumentError,
     ("rule", "(b, h, q_idx, kv_idx)", "bool")),
    ("number joined", lambda: Causal() & 3, ArgumentError, ("operand of &", "int")),
    ("nothing joined", lambda: Causal() & None, ArgumentError, ("operand of &", "None")),
    ("truth of a rule", lambda: bool(Causal()), ArgumentError,
     ("no truth value", "a & b", "a | b", "~a")),
    ("rules joined by and", lambda: Causal() and SlidingWindow(3), ArgumentError,
     ("no truth value", "instead of and, or and not")),
    ("if rule", lambda: 1 if Causal() else 0, ArgumentError, ("no truth value", "a & b")),
    ("rule without __call__", lambda: Unwritten(), RuleError,
     ("Unwritten", "__call__(self, b, h, q_idx, kv_idx)")),
    ("score without __call__", lambda: UnwrittenScore(), RuleError,
     ("UnwrittenScore", "__call__(self, score, b, h, q_idx, kv_idx)")),
    ("MaskRule itself", lambda: fs.MaskRule(), RuleError, ("MaskRule", "__call__")),
    ("of nothing", lambda: fs.MaskRule.of(None), ArgumentError, ("MaskRule.of", "None")),
]  # fmt: skip

SELECTIONS: list[Case] = [
    ("raw select", lambda: attend(select=ids(1, 1, Q, 4)), ArgumentError,
     ("select", "tensor [1, 1, 8, 4]", "from_indices", "adapter")),
    ("rule select", lambda: attend(select=Causal()), ArgumentError, ("select", "Causal")),
    ("function select", lambda: attend(select=lambda q, k: ids(1, 1, Q, 4)), ArgumentError,
     ("select", "function")),
    ("selector in build_layout", lambda: layout(select=Quest()), ArgumentError,
     ("select", "Quest", "attention or make_plan")),
    ("raw in build_layout", lambda: layout(select=ids(1, 1, Q, 4)), ArgumentError,
     ("select", "tensor [1, 1, 8, 4]", "from_indices")),
    ("selector in plan.layout", lambda: selecting_plan.layout(Quest()), ArgumentError,
     ("plan.layout", "Selector", "selector.select(q, k, plan.grid, plan.rule)")),
    ("raw in plan.layout", lambda: selecting_plan.layout(ids(1, 1, Q, 4)), ArgumentError,
     ("select", "tensor [1, 1, 8, 4]", "from_indices")),
    ("none in plan.layout", lambda: selecting_plan.layout(), LayoutError,
     ("plan", "made with a selection", "without one")),
    ("one too many in plan.layout", lambda: plan.layout(chosen()), LayoutError,
     ("plan", "made without a selection", "with one")),
    ("other heads in plan.layout", lambda: selecting_plan.layout(chosen(heads=2)), LayoutError,
     ("batch 1", "heads 1", "heads 2", "make a plan")),
    ("other blocks in plan.layout", lambda: selecting_plan.layout(chosen(q_block=4)), LayoutError,
     ("blocks (1, 1)", "blocks (4, 1)", "make a plan")),
    ("index past the keys",
     lambda: given(torch.tensor([[[[0, 1]], [[0, 77]]]]), q_len=1), SelectionError,
     ("index 77", "batch 0", "head 1", "row 0", "0..15", "out_of_range='drop'")),
    ("index below -1", lambda: given(torch.tensor([[[[0], [1], [-2]]]]), q_len=3), SelectionError,
     ("index -2", "batch 0", "head 0", "row 2", "-1 means none", "out_of_range='drop'")),
    ("index past the blocks", lambda: given(ids(2, 1, Q, 1) + 4, kv_block=4), SelectionError,
     ("index 4", "batch 0", "0..3")),
    ("index past the keys in an adapter", lambda: fs.adapters.dsa(ids(1, Q, 2) + 99, kv_len=S),
     SelectionError, ("index 99", "row 0", "0..15", "drop")),
    ("float indices", lambda: given(torch.zeros(1, 1, Q, 2)), ArgumentError,
     ("indices", "int32 or int64", "torch.float32")),
    ("bool indices", lambda: given(torch.zeros(1, 1, Q, S, dtype=torch.bool)), ArgumentError,
     ("indices", "int32 or int64", "torch.bool", "a mask is a rule")),
    ("list of indices", lambda: given([[1]]), ArgumentError,
     ("indices", "tensor [B, H, R, K]", "list")),
    ("3-D indices", lambda: given(ids(B, Q, 4)), ShapeError,
     ("indices", "[B, H, R, K]", "[2, 8, 4]", "adapters.dsa")),
    ("2-D indices", lambda: given(ids(Q, 4)), ShapeError,
     ("indices", "[B, H, R, K]", "2 axes [8, 4]")),
    ("transposed indices", lambda: given(ids(B, Q, HKV, 4)), ShapeError,
     ("indices", "R = 8", "[2, 8, 2, 4]", "adapters.nsa")),
    ("wrong rows", lambda: given(ids(B, HKV, Q + 1, 4)), ShapeError,
     ("indices", "ceil(q_len / q_block) = 8", "R = 9")),
    ("wrong H", lambda: attend(select=chosen(heads=3)), ShapeError,
     ("select", "3 heads", "1 (shared)", "2 (per KV head)", "4 (per query head)")),
    ("wrong B", lambda: attend(select=chosen(batch=3)), ShapeError,
     ("select", "batch 3", "the call has 2", "1 or the same")),
    ("wrong q_len", lambda: attend(select=chosen(q_len=9)), ShapeError,
     ("select", "q_len 9", "the call has 8")),
    ("wrong kv_len", lambda: attend(select=chosen(kv_len=9)), ShapeError,
     ("select", "kv_len 9", "the call has 16")),
    ("kv_block 0", lambda: given(ids(1, 1, Q, 4), kv_block=0), SelectionError,
     ("kv_block", "at least 1", "got 0")),
    ("q_block -1", lambda: given(ids(1, 1, Q, 4), q_block=-1), SelectionError,
     ("q_block", "at least 1", "got -1")),
    ("kv_block 1.5", lambda: given(ids(1, 1, Q, 4), kv_block=1.5), ArgumentError,
     ("kv_block", "an int", "got 1.5")),
    ("kv_len as text", lambda: given(ids(1, 1, Q, 4), kv_len="16"), ArgumentError,
     ("kv_len", "an int", "'16'")),
    ("out_of_range unknown", lambda: given(ids(1, 1, Q, 4), out_of_range="ignore"), ArgumentError,
     ("out_of_range", "'error' or 'drop'", "'ignore'")),
    ("sparse indices", lambda: given(ids(1, 1, Q, 4).to_sparse()), ArgumentError,
     ("indices", "a dense tensor", "torch.sparse_coo", "padded with -1")),
    ("dsa of 4 axes", lambda: fs.adapters.dsa(ids(1, 1, Q, 4), kv_len=S), ShapeError,
     ("adapters.dsa", "[B, S_q, k]", "[1, 1, 8, 4]", "adapters.msa or nsa", "Selection.from_indices")),
    ("nsa of 3 axes", lambda: fs.adapters.nsa(ids(1, Q, 4), kv_len=S, block=4), ShapeError,
     ("adapters.nsa", "[B, T, H_kv, S]", "[1, 8, 4]", "adapters.dsa or attn_gym")),
    ("attn_gym of floats", lambda: fs.adapters.attn_gym(torch.zeros(1, Q, 4), kv_len=S),
     ArgumentError, ("adapters.attn_gym", "int32 or int64", "torch.float32")),
    ("coarser by refine", lambda: chosen().refine(q_block=3, kv_block=1), SelectionError,
     ("refine", "divide (1, 1)", "(3, 1)")),
    ("union of lengths", lambda: chosen() | chosen(kv_len=9), ShapeError,
     ("different lengths", "kv_len 16 and 9")),
    ("union of heads", lambda: chosen(heads=2) | chosen(heads=3), ShapeError,
     ("heads 2 and 3", "do not combine")),
    ("union of blocks that do not divide",
     lambda: given(ids(1, 1, Q, 2), kv_block=3) | given(ids(1, 1, Q, 2), kv_block=4),
     SelectionError, ("kv_block 3 and 4", "do not combine", "refine")),
    ("rule with a selection", lambda: Causal() & chosen(), ArgumentError,
     ("operand of &", "Selection", "pass it as select")),
    ("kv_len of each sequence", lambda: given(ids(1, 1, Q, 2), kv_len=torch.tensor([3, 4])),
     ArgumentError, ("kv_len must be an int", "k.shape[2]", "q_offset")),
    ("indices without values", lambda: given(ids(1, 1, Q, 2).to("meta")), SelectionError,
     ("indices are on meta", "move them")),
    ("a batch and a grid of one",
     lambda: fs.build_layout(select=chosen(batch=2), grid=fs.Grid(Q, S), heads=(HQ, HKV)),
     ShapeError, ("batch 2", "has 1", "Grid(q_len, kv_len, batch=...)")),
    ("union with a rule", lambda: chosen() | Causal(), ArgumentError, ("Selection", "Causal")),
    ("selector without score", lambda: attend(select=fs.Selector()), SelectionError,
     ("Selector", "score(self, q, k, grid)", "select")),
    ("selector of no blocks", lambda: Quest(block=0), ArgumentError,
     ("Quest block", "at least 1", "got 0")),
    ("selector keep as text", lambda: Quest(keep="4"), ArgumentError,
     ("Quest keep", "an int", "'4'")),
    ("selector heads unknown", lambda: Quest(heads="all"), ArgumentError,
     ("Quest heads", "'shared', 'kv' or 'query'", "'all'")),
]  # fmt: skip

TENSORS: list[Case] = [
    ("Hq not a multiple of Hkv", lambda: fs.attention(q[:, :3], k, v), ShapeError,
     ("3 query heads", "2 KV heads", "multiple of Hkv")),
    ("fewer query than KV heads", lambda: fs.attention(q[:, :1], k, v), ShapeError,
     ("1 query heads", "2 KV heads", "multiple of Hkv")),
    ("D differs", lambda: fs.attention(q[..., :8], k, v), ShapeError,
     ("axis 'd'", "8 in q", "16 in k", "[2, 2, 16, 16]")),
    ("S differs", lambda: fs.attention(q, k, v[:, :, :-1]), ShapeError,
     ("axis 's'", "16 in k", "15 in v")),
    ("batch differs", lambda: fs.attention(q[:1], k, v), ShapeError,
     ("axis 'b'", "1 in q", "2 in k")),
    ("KV heads differ", lambda: fs.attention(q, k, v[:, :1]), ShapeError,
     ("axis 'g'", "2 in k", "1 in v")),
    ("mixed dtypes", lambda: fs.attention(q, k.bfloat16(), v), ShapeError,
     ("q is torch.float32", "k torch.bfloat16", "cast", "autocast")),
    ("mixed dtype of v", lambda: fs.attention(q, k, v.double()), ShapeError,
     ("q is torch.float32", "v torch.float64", "cast")),
    ("int tensors", lambda: fs.attention(q.int(), k.int(), v.int()), ShapeError,
     ("q, k and v", "fp16, bf16, fp32 or fp64", "torch.int32")),
    ("complex tensors", lambda: fs.attention(q + 0j, k + 0j, v + 0j), ShapeError,
     ("q, k and v", "torch.complex64")),
    ("3-D q", lambda: fs.attention(q[0], k, v), ShapeError,
     ("q", "4 axes [b h q d]", "[4, 8, 16]")),
    ("missing k", lambda: fs.attention(q, None, v), ArgumentError,
     ("k", "a tensor", "NoneType")),
    ("wrong device", lambda: fs.attention(q, k.to("meta"), v), ShapeError,
     ("q is on cpu", "k on meta", "move one")),
    ("no queries", lambda: fs.attention(q[:, :, :0], k, v), ShapeError,
     ("q_len", "at least 1", "got 0")),
    ("no keys", lambda: fs.attention(q, k[:, :, :0], v[:, :, :0]), ShapeError,
     ("kv_len", "at least 1", "got 0")),
    ("no batch", lambda: fs.attention(q[:0], k[:0], v[:0]), ShapeError,
     ("batch", "at least 1", "got 0")),
    ("no heads", lambda: fs.attention(q[:, :0], k, v), ArgumentError,
     ("heads", "query heads", "(0, 2)")),
]  # fmt: skip

OPTIONS: list[Case] = [
    ("tile 8", lambda: attend(tile=8), BackendError, ("tile", "at least 16", "got 8", "exact")),
    ("tile (16, 8)", lambda: attend(tile=(16, 8)), BackendError,
     ("tile", "at least 16", "(16, 8)")),
    ("tile as text", lambda: attend(tile="big"), ArgumentError,
     ("tile", "(query size, key size)", "'big'")),
    ("tile float", lambda: attend(tile=64.0), ArgumentError, ("tile", "a size", "64.0")),
    ("tile of three", lambda: attend(tile=(64, 64, 64)), ArgumentError,
     ("tile", "(query size, key size)", "(64, 64, 64)")),
    ("block_size 8", lambda: layout(block_size=8), BackendError,
     ("block_size", "at least 16", "got 8")),
    ("block_size as text", lambda: layout(block_size="x"), ArgumentError,
     ("block_size", "(query size, key size)", "'x'")),
    ("heads as a number", lambda: layout(heads=4), ArgumentError,
     ("heads", "(query heads, KV heads)", "got 4")),
    ("heads that do not divide", lambda: layout(heads=(4, 3)), ShapeError,
     ("4 query heads", "3 KV heads", "multiple of Hkv")),
    ("grid as lengths", lambda: layout(grid=(Q, S)), ArgumentError,
     ("grid", "Grid(q_len, kv_len)", "tuple")),
    ("Grid of no queries", lambda: fs.Grid(0, 3), ShapeError, ("q_len", "at least 1", "got 0")),
    ("Grid of a float", lambda: fs.Grid(1.0, 3), ArgumentError, ("q_len", "an int", "1.0")),
    ("scale tensor", lambda: attend(scale=torch.tensor(0.1)), ArgumentError,
     ("scale", "a number", "Tensor", "ScoreRule.of")),
    ("scale nan", lambda: attend(scale=math.nan), ArgumentError, ("scale", "finite", "nan")),
    ("scale inf", lambda: attend(scale=math.inf), ArgumentError, ("scale", "finite", "inf")),
    ("scale as text", lambda: attend(scale="0.1"), ArgumentError, ("scale", "a number", "str")),
    ("sink of KV heads", lambda: attend(sink=torch.zeros(HKV)), ShapeError,
     ("sink", "shape [4]", "one logit a query head", "got [2]")),
    ("sink per batch", lambda: attend(sink=torch.zeros(B, HQ)), ShapeError,
     ("sink", "shape [4]", "got [2, 4]")),
    ("sink of ints", lambda: attend(sink=ids(HQ)), ArgumentError,
     ("sink", "a float tensor [Hq]", "torch.int64")),
    ("sink as a number", lambda: attend(sink=0.5), ArgumentError,
     ("sink", "a float tensor [Hq]", "float")),
    ("sink elsewhere", lambda: attend(sink=torch.zeros(HQ, device="meta")), ShapeError,
     ("sink is on meta", "q on cpu", "move")),
    ("fallback unknown", lambda: attend(select=chosen(), fallback="none"), ArgumentError,
     ("fallback", "'self' or ('local', n)", "'none'")),
    ("fallback of none", lambda: attend(select=chosen(), fallback=("local", 0)), ArgumentError,
     ("fallback", "n >= 1", "('local', 0)")),
    ("fallback without n", lambda: attend(select=chosen(), fallback="local"), ArgumentError,
     ("fallback", "('local', n)", "'local'")),
    ("empty unknown", lambda: attend(empty="raise"), ArgumentError,
     ("empty", "'zero' or 'error'", "'raise'")),
    ("backend unknown", lambda: attend(backend="triton"), BackendError,
     ("backend", "auto", "flex", "tiles", "'triton'")),
    ("pack unknown", lambda: attend(pack="heads"), ArgumentError,
     ("pack", "'identity', 'fold' or 'pack'", "'heads'")),
    ("fold by copy", lambda: fs.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v,
                                          pack="fold"), LayoutError,
     ("pack='fold'", "contiguous", "leave pack out")),
    ("pack by copy", lambda: fs.attention(q, k.transpose(1, 2).contiguous().transpose(1, 2), v,
                                          pack="pack"), LayoutError,
     ("pack='pack'", "k and v", "contiguous", "leave pack out")),
    ("q_offset float", lambda: attend(q_offset=1.5), ArgumentError,
     ("q_offset", "an int or an int tensor [B]", "1.5")),
    ("q_offset float tensor", lambda: attend(q_offset=torch.zeros(B)), ArgumentError,
     ("q_offset", "an int tensor [B]", "torch.float32")),
    ("q_offset of three", lambda: attend(q_offset=ids(3)), ShapeError,
     ("q_offset", "shape [2]", "one position a sequence", "got [3]")),
    ("q_offset list", lambda: attend(q_offset=[1, 2]), ArgumentError,
     ("q_offset", "an int or an int tensor [B]", "[1, 2]")),
    ("rows 0", lambda: fs.check(q, k, v, rows=0), ArgumentError,
     ("rows", "at least 1", "got 0")),
    ("picture without a length", lambda: fs.picture(Causal()), ArgumentError,
     ("picture", "picture(rule, 16)", "Selection")),
    ("query without keys", lambda: attend(rule=sees_little, empty="error"), EmptyRowError,
     ("query 3", "batch 0", "head 0", "fallback='self'", "empty='zero'")),
    ("query without candidates",
     lambda: attend(rule=Causal(), select=given(ids(B, HKV, Q, 1) + 12), empty="error"),
     EmptyRowError, ("query 0", "batch 0", "head 0", "fallback='self'")),
]  # fmt: skip

PLANS: list[Case] = [
    ("run of another batch", lambda: plan.run(q[:1], k[:1], v[:1]), ShapeError,
     ("q [2, 4, 8, 16]", "got [1, 4, 8, 16]", "make a plan")),
    ("run of another length", lambda: plan.run(q, k[:, :, 1:], v[:, :, 1:]), ShapeError,
     ("k [2, 2, 16, 16]", "got [2, 2, 15, 16]", "make a plan")),
    ("run of another dtype", lambda: plan.run(*low), ShapeError,
     ("torch.float32 on cpu", "got torch.bfloat16", "make a plan")),
    ("layout of another plan", lambda: plan.run(q, k, v, other_plan.first), LayoutError,
     ("Layout", "does not belong to this plan", "plan.layout")),
    ("layout of a selection", lambda: plan.run(q, k, v, selecting_plan.first), LayoutError,
     ("Layout", "does not belong to this plan", "plan.layout")),
    ("layout of other tiles", lambda: plan.run(q, k, v, layout(rule=Causal(), block_size=16)),
     LayoutError, ("16x16", "16x64", "plan.layout")),
    ("partial without lse", lambda: plan.run(q, k, v).partial, ArgumentError,
     ("no lse", "return_lse=True")),
    ("merge without lse", lambda: fs.merge([part, fs.Partial(q, None)]), ArgumentError,
     ("merge", "place 1", "return_lse=True")),
    ("merge of nothing", lambda: fs.merge([]), ArgumentError, ("merge", "at least one Partial")),
    ("merge of tensors", lambda: fs.merge([q, q]), ArgumentError,
     ("merge", "Partials", "Tensor at place 0")),
    ("merge of a result", lambda: fs.merge([part, plan.run(q, k, v)]), ArgumentError,
     ("merge", "Result at place 1")),
    ("merge of shapes", lambda: fs.merge([part, fs.Partial(part.out[:1], part.lse[:1])]),
     ShapeError, ("axis 'b'", "2 in out0", "1 in out1")),
    ("merge of one tuple", lambda: fs.merge([tuple(part)]), ArgumentError,
     ("merge", "Partials", "tuple at place 0")),
]  # fmt: skip

GALLERY: list[Case] = [
    ("Document of floats", lambda: Document(torch.zeros(S)), ArgumentError,
     ("Document document_of", "int tensor", "torch.float32")),
    ("Document of 3 axes", lambda: Document(ids(1, 1, S)), ArgumentError,
     ("Document document_of", "[B, kv_len]", "[1, 1, 16]")),
    ("Document of a list", lambda: Document([1, 2]), ArgumentError,
     ("Document document_of", "int tensor", "list")),
    ("SlidingWindow(0)", lambda: SlidingWindow(0), ArgumentError,
     ("SlidingWindow size", "at least 1", "got 0")),
    ("Softcap(-1)", lambda: Softcap(-1.0), ArgumentError, ("Softcap cap", "positive", "-1.0")),
    ("Softcap(nan)", lambda: Softcap(math.nan), ArgumentError, ("Softcap cap", "positive", "nan")),
    ("PrefixLM(-1)", lambda: PrefixLM(-1), ArgumentError,
     ("PrefixLM prefix", "at least 0", "got -1")),
    ("PrefixLM of floats", lambda: PrefixLM(torch.zeros(2)), ArgumentError,
     ("PrefixLM prefix", "int tensor [B]", "torch.float32")),
    ("AttentionSink(0)", lambda: AttentionSink(0), ArgumentError,
     ("AttentionSink size", "at least 1", "got 0")),
    ("LeftPadding of a list", lambda: LeftPadding([1]), ArgumentError,
     ("LeftPadding padding", "int tensor [B]", "list")),
    ("RightPadding of floats", lambda: RightPadding(torch.zeros(2)), ArgumentError,
     ("RightPadding lengths", "int tensor [B]", "torch.float32")),
    ("Alibi of ints", lambda: Alibi(ids(4)), ArgumentError,
     ("Alibi slopes", "float tensor [Hq]", "Alibi.of_heads")),
    ("HeadBias of one axis", lambda: HeadBias(torch.zeros(3)), ArgumentError,
     ("HeadBias bias", "[Hq, distances]")),
]  # fmt: skip


def short(heads: int) -> Any:
    return lambda s, b, h, q_idx, kv_idx: s + torch.ones(heads)[h]


TABLES: list[Case] = [
    ("table of keys", lambda: attend(rule=Document(ids(S - 1))), RuleError,
     ("rule Document", "document_of", "int64[15]", "15")),
    ("table of queries after the keys", lambda: attend(rule=Document(ids(S)), q_offset=S),
     RuleError, ("rule Document", "document_of", "int64[16]")),
    ("table of sequences", lambda: attend(rule=RightPadding(ids(1) + 9)), RuleError,
     ("rule RightPadding", "lengths", "int64[1]")),
    ("table of heads", lambda: attend(score=Alibi(torch.ones(HKV))), RuleError,
     ("score Alibi", "slopes", "float32[2]")),
    ("table before its start", lambda: attend(rule=Document(ids(S)), q_offset=-1), RuleError,
     ("rule Document", "document_of", "int64[16]", "index -1")),
    ("table from the end", lambda: attend(rule=lambda b, h, q_idx, kv_idx: document[kv_idx - S] == 0),
     RuleError, ("rule <lambda>", "document", "int64[16]", "index -16", "clamp")),
    ("closed over", lambda: attend(rule=lambda b, h, q_idx, kv_idx: table[kv_idx + 1, q_idx]),
     RuleError, ("rule <lambda>", "table", "bool[16, 16]", "16")),
]  # fmt: skip


FLEX: list[Case] = [
    ("flex with gradients", lambda: fs.attention(learned, k, v, backend="flex"), BackendError,
     ("backend 'flex'", "no backward on CPU", "backend='tiles'")),
    ("flex with a learned score",
     lambda: attend(score=Alibi(torch.ones(HQ, requires_grad=True)), backend="flex"), BackendError,
     ("backend 'flex'", "no backward on CPU", "backend='tiles'")),
    ("flex with lse", lambda: attend(backend="flex", return_lse=True), BackendError,
     ("backend 'flex'", "no lse on CPU", "backend='tiles'")),
    ("flex with a sink", lambda: attend(backend="flex", sink=torch.zeros(HQ)), BackendError,
     ("backend 'flex'", "no lse on CPU", "backend='tiles'")),
    ("flex in fp64", lambda: fs.attention(*(x.double() for x in (q, k, v)), backend="flex"),
     BackendError, ("backend 'flex'", "no fp64", "backend='tiles'")),
    ("flex of wrong heads", lambda: fs.attention(q[:, :3], k, v, backend="flex"), ShapeError,
     ("3 query heads", "multiple of Hkv")),
    ("flex of a wrong selection", lambda: attend(select=chosen(heads=3), backend="flex"),
     ShapeError, ("select", "3 heads")),
    ("flex with a nan scale", lambda: attend(scale=math.nan, backend="flex"), ArgumentError,
     ("scale", "finite", "nan")),
    ("flex past a table", lambda: attend(rule=Document(ids(S - 1)), backend="flex"), RuleError,
     ("rule Document", "document_of")),
    ("flex of an empty row", lambda: attend(rule=sees_little, empty="error", backend="flex"),
     EmptyRowError, ("query 3", "batch 0", "head 0")),
    ("flex of small tiles", lambda: attend(tile=8, backend="flex"), BackendError,
     ("tile", "at least 16")),
]  # fmt: skip


class IntegerScores(fs.Selector):
    def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
        return torch.zeros(1, 1, *grid.shape(self.q_block, self.block), dtype=torch.int64)


class ForeignBatch(fs.Selector):
    def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
        return torch.zeros(3, 1, *grid.shape(self.q_block, self.block))


class NoScores(fs.Selector):
    def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Any:
        return None


def a_list_like_an_accepted_name() -> Any:
    plain = fs.MaskRule.of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    attend(rule=plain, backend="tiles")
    return attend(rule=plain, backend=["tiles"])


def under_autocast() -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fs.attention(q.int(), k.int(), v.int())


def reads_past_the_end_at_one_pair(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return document[((q_idx == 1001) & (kv_idx == 501)) * S] == 0


many = torch.zeros(1, 1, 2048, 1)

JUDGED: list[Case] = [
    ("list as q", lambda: fs.attention([1], k, v), ArgumentError, ("q", "a tensor", "list")),
    ("array as q", lambda: fs.attention(q.numpy(), k, v), ArgumentError,
     ("q", "a tensor", "ndarray")),
    ("SlidingWindow of text", lambda: SlidingWindow("4"), ArgumentError,
     ("SlidingWindow size", "'4'")),
    ("SlidingWindow of None", lambda: SlidingWindow(None), ArgumentError,
     ("SlidingWindow size", "None")),
    ("SlidingWindow of two", lambda: SlidingWindow(torch.tensor([1, 2])), ArgumentError,
     ("SlidingWindow size", "int64[2]")),
    ("AttentionSink of text", lambda: AttentionSink("4"), ArgumentError,
     ("AttentionSink size", "'4'")),
    ("Softcap of None", lambda: Softcap(None), ArgumentError, ("Softcap cap", "None")),
    ("PrefixLM of text", lambda: PrefixLM("a"), ArgumentError, ("PrefixLM prefix", "'a'")),
    ("reference of a raw select", lambda: fs.reference(q, k, v, select=ids(1, 1, Q, 3)),
     ArgumentError, ("select", "tensor [1, 1, 8, 3]", "from_indices")),
    ("table of one pair",
     lambda: fs.attention(many, many, many, rule=reads_past_the_end_at_one_pair), RuleError,
     ("rule reads_past_the_end_at_one_pair", "table")),
    ("selector in build_layout with a device", lambda: layout(select=Quest(), device="cpu"),
     ArgumentError, ("select", "Quest", "attention or make_plan")),
    ("raw in build_layout with a device", lambda: layout(select=ids(1, 1, Q, 4), device="cpu"),
     ArgumentError, ("select", "tensor [1, 1, 8, 4]", "from_indices")),
    ("selector class", lambda: attend(select=Quest), ArgumentError,
     ("select", "class Quest", "Quest(...)")),
    ("list select", lambda: attend(select=[1, 2]), ArgumentError,
     ("select", "a Selection or a Selector", "list")),
    ("block mask as layout", lambda: plan.run(q, k, v, block_mask), ArgumentError,
     ("layout", "BlockMask", "plan.layout")),
    ("selection as layout", lambda: selecting_plan.run(q, k, v, chosen()), ArgumentError,
     ("layout", "Selection", "plan.layout")),
    ("list as q of check", lambda: fs.check([1], k, v), ArgumentError,
     ("q", "a tensor", "list")),
    ("nested tensor", lambda: fs.attention(torch.nested.as_nested_tensor([q[0], q[0]]), k, v),
     ShapeError, ("q", "nested", "Document")),
    ("jagged tensor", lambda: fs.attention(
        q, torch.nested.as_nested_tensor([k[0], k[0]], layout=torch.jagged), v),
     ShapeError, ("k", "nested", "pad them")),
    ("endless scale", lambda: fs.attention(q, k, v, scale=10**400), ArgumentError,
     ("scale must be finite",)),
    ("scale of nan", lambda: fs.attention(q, k, v, scale=float("nan")), ArgumentError,
     ("scale must be finite",)),
    ("sparse tensor", lambda: fs.attention(q.to_sparse(), k, v), ShapeError,
     ("q", "sparse", "to_dense()")),
    ("no head dim", lambda: fs.attention(q[..., :0], k[..., :0], v), ShapeError,
     ("q", "[2, 4, 8, 0]", "at least 1")),
    ("no value dim", lambda: fs.attention(q, k, v[..., :0]), ShapeError,
     ("v", "[2, 2, 16, 0]", "at least 1")),
    ("int tensors under autocast", under_autocast, ShapeError, ("q, k and v", "torch.int32")),
    ("fallback of True", lambda: attend(select=chosen(), fallback=("local", True)),
     ArgumentError, ("fallback", "n >= 1", "('local', True)")),
    ("merge of an empty generator", lambda: fs.merge(p for p in ()), ArgumentError,
     ("merge", "at least one Partial")),
    ("merge across devices",
     lambda: fs.merge([part, fs.Partial(part.out.to("meta"), part.lse.to("meta"))]),
     ShapeError, ("place 1", "meta", "cpu")),
    ("reference of D", lambda: fs.reference(q[..., :8], k, v), ShapeError,
     ("axis 'd'", "8 in q", "16 in k")),
    ("reference of heads", lambda: fs.reference(q[:, :3], k, v), ShapeError,
     ("3 query heads", "multiple of Hkv")),
    ("reference of wrong heads", lambda: fs.reference(q, k, v, select=chosen(heads=3)),
     ShapeError, ("select", "3 heads")),
    ("reference of wrong kv_len", lambda: fs.reference(q, k, v, select=chosen(kv_len=9)),
     ShapeError, ("select", "kv_len 9")),
    ("reference of a fallback", lambda: fs.reference(q, k, v, select=chosen(), fallback="none"),
     ArgumentError, ("fallback", "'none'")),
    ("reference of a sink", lambda: fs.reference(q, k, v, sink=torch.zeros(HKV)), ShapeError,
     ("sink", "shape [4]", "got [2]")),
    ("reference of a scale", lambda: fs.reference(q, k, v, scale=math.nan), ArgumentError,
     ("scale", "finite", "nan")),
    ("refine to 0", lambda: chosen().refine(q_block=0, kv_block=1), SelectionError,
     ("refine", "(0, 1)", "at least 1")),
    ("union of batches", lambda: chosen(batch=2) | chosen(batch=4), ShapeError,
     ("batch 2 and 4", "do not combine")),
    ("selector of int scores", lambda: attend(select=IntegerScores()), SelectionError,
     ("IntegerScores.score", "float", "torch.int64")),
    ("selector of another batch", lambda: attend(select=ForeignBatch(), rule=RightPadding(ids(2) + 9)),
     SelectionError, ("ForeignBatch.score", "[3, 1, 1, 1]")),
    ("selector of no scores", lambda: attend(select=NoScores()), SelectionError,
     ("NoScores.score", "NoneType")),
]  # fmt: skip


def named(cases: list[Case]) -> list[Any]:
    return [pytest.param(*case[1:], id=case[0].replace(" ", "-")) for case in cases]


@pytest.mark.parametrize(
    ("use", "error", "words"),
    named([*SLOTS, *SELECTIONS, *TENSORS, *OPTIONS, *PLANS, *GALLERY, *TABLES, *FLEX, *JUDGED]),
)
def test_refused(
    use: Callable[[], Any], error: type[fs.FlexSparseError], words: tuple[str, ...]
) -> None:
    refused(use, error, *words)


def test_meta_tensors_are_judged_before_their_device_is_asked() -> None:
    meta = [x.to("meta") for x in (q, k, v)]
    refused(lambda: fs.attention(*meta), ShapeError, "q", "meta")


@pytest.mark.parametrize("flag", ["sanitize", "return_lse"])
def test_a_flag_is_true_or_false(flag: str) -> None:
    refused(lambda: attend(**{flag: "no"}), ArgumentError, flag, "'no'", "True or False")


def test_an_nsa_tensor_given_to_msa_is_recognised() -> None:
    indices = torch.zeros(1, q.shape[2], k.shape[1], 1, dtype=torch.int64)
    select = fs.adapters.msa(indices, kv_len=k.shape[2], block=16)
    refused(lambda: attend(select=select), ShapeError, "q_len", "adapters.nsa")


def test_a_list_like_an_accepted_name_is_refused() -> None:
    refused(a_list_like_an_accepted_name, BackendError, "backend", "auto", "['tiles']")


def test_errors_are_also_what_python_calls_them() -> None:
    kinds = {
        ArgumentError: TypeError, RuleError: TypeError, ShapeError: ValueError,
        SelectionError: ValueError, LayoutError: ValueError, BackendError: ValueError,
        EmptyRowError: ValueError,
    }  # fmt: skip
    for error, python in kinds.items():
        assert issubclass(error, fs.FlexSparseError)
        assert issubclass(error, python)


def test_the_first_empty_query_is_named_in_the_order_of_the_batch() -> None:
    indices = ids(B, HQ, Q, 1)
    indices[1, 3, 5] = indices[1, 2, 7] = -1
    message = refused(lambda: attend(select=given(indices), empty="error"), EmptyRowError)
    assert message.startswith("query 7 of batch 1, head 2 ")


def test_an_empty_query_of_a_folded_layout_is_named_logically() -> None:
    indices = ids(B, HKV, Q, 1)
    indices[1, 1, 5] = -1
    words = "query 5 of batch 1, head 2"
    refused(lambda: attend(select=given(indices), empty="error"), EmptyRowError, words)


def test_what_was_refused_once_is_refused_again() -> None:
    for _ in range(3):
        refused(lambda: attend(rule=branches), RuleError, "branches in Python")
        refused(lambda: attend(scale=math.nan), ArgumentError, "scale")


def test_a_class_that_nobody_made_a_dataclass_is_told() -> None:
    class Every(fs.MaskRule):
        n: int

        def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx % self.n == 0

    class Times(fs.ScoreRule):
        factor: float

    with pytest.raises(fs.FlexSparseError, match=r"Every has fields \(n\) but is no dataclass"):
        Every(4)
    with pytest.raises(
        fs.FlexSparseError, match=r"Times has fields \(factor\) but is no dataclass"
    ):
        Times(factor=2.0)
