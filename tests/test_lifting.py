"""A rule's numbers are arguments of its kernel, and mean in it what they mean in Python."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexsparse as fs
from flexsparse.lifting import _BINARY, _UNARY, Float, Int, marked
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.parameters import is_number
from flexsparse.rules import trace_rule
from flexsparse.scores import trace_score

LENGTH = 256
HEADS = 4
By = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Held(fs.MaskRule):
    """A rule of numbers, as ``by`` computes it."""

    by: By
    n: int = 4
    f: float = 0.3
    sizes: tuple[int, ...] = (3, 5)
    first: Any = None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.by(self, h, q_idx, kv_idx)


def steps(rule: Any, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    seen = q == kv
    for i in range(rule.n):
        seen = seen | (kv == i * rule.n)
    return seen


# What Python does with a number, and what it does not say where it meets a tensor.
WAYS: dict[str, By] = {
    "a product": lambda r, h, q, kv: kv < r.n * r.f,
    "half of it": lambda r, h, q, kv: kv < 0.5 * r.n,
    "its root": lambda r, h, q, kv: kv < math.sqrt(r.n) * 1.5,
    "times an index": lambda r, h, q, kv: kv < q * r.f,
    "an index over it": lambda r, h, q, kv: kv < q / (r.f + 1),
    "floor of that": lambda r, h, q, kv: kv < (q // (r.f + 1)) + (q / (r.f + 1)).floor(),
    "what is left of it": lambda r, h, q, kv: kv % (r.f + 2) < 1.5,
    "by head": lambda r, h, q, kv: q - kv < r.n * r.f * (h + 1),
    "a root of it": lambda r, h, q, kv: kv < torch.sqrt(q * r.f) * 9,
    "a table over it": lambda r, h, q, kv: kv < r.first[h] * r.f + r.n,
    "a quotient": lambda r, h, q, kv: kv < r.n / 11 * 11,
    "a square": lambda r, h, q, kv: (q - kv) ** 2 < r.n**2,
    "a remainder": lambda r, h, q, kv: kv % (r.n % 7 + 1) == 0,
    "bits": lambda r, h, q, kv: (kv & (r.n | 1)) == (r.n >> 1 & 3),
    "less it": lambda r, h, q, kv: r.n - q < kv,
    "divided by it": lambda r, h, q, kv: q // r.n == kv // r.n,
    "between choices": lambda r, h, q, kv: kv < torch.where(q >= 64, r.n, 0) * r.n + 64,
    "between floats": lambda r, h, q, kv: kv * 1.0 < torch.where(q >= 64, r.f, 2) * 300,
    "a bound": lambda r, h, q, kv: q.clamp(0, r.n) <= kv,
    "both bounds": lambda r, h, q, kv: (q - kv).clamp(min=-r.n, max=r.n) == q - kv,
    "filled": lambda r, h, q, kv: torch.full_like(q, r.n) < kv,
    "in a set": lambda r, h, q, kv: kv < (100 if r.n in {4, 8} else 200),
    "in a dict": lambda r, h, q, kv: kv < {4: 100}.get(r.n, 200),
    "by its class": lambda r, h, q, kv: kv < (100 if isinstance(r.n, int) else 200),
    "by its type": lambda r, h, q, kv: kv < (100 if type(r.n) is int else 200),
    "for late heads": lambda r, h, q, kv: (q >= kv) & (h < (2 if r.n in {4, 8} else 9)),
    "beside a short table": lambda r, h, q, kv: (
        (q - kv < (8 if r.n in {4, 8} else 99)) & (kv >= r.first[h])
    ),
    "counted": steps,
    "branched on": lambda r, h, q, kv: q >= kv if r.n > 4 else q == kv,
    "the larger": lambda r, h, q, kv: kv < max(r.n, 100),
    "rounded": lambda r, h, q, kv: kv < round(r.n * r.f) + math.floor(r.f),
    "unpacked": lambda r, h, q, kv: (q - kv).abs() < r.sizes[0] * r.sizes[-1],
    "text": lambda r, h, q, kv: kv < len(f"{r.n}") * 100,
}


def right(rule: fs.MaskRule, length: int = LENGTH) -> None:
    at = torch.arange(length)
    heads = torch.arange(HEADS).view(-1, 1, 1)
    want = rule(torch.tensor(0), heads, at[:, None], at).expand(HEADS, length, length)
    layout = fs.build_layout(
        rule=rule, grid=fs.Grid(length, length), heads=(HEADS, HEADS), block_size=16
    )
    assert torch.equal(layout.dense()[0].expand_as(want), want)
    assert torch.equal(
        layout.mask_mod(torch.tensor(0), heads, at[:, None], at).expand_as(want), want
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n", "f"), [(4, 0.3), (5, 0.5), (340, 0.3), (94, 0.1), (65536, 1e-3)])
def test_a_number_means_what_it_means_in_python(way: str, n: int, f: float) -> None:
    if way == "counted" and n > 100:
        n = 17
    right(Held(WAYS[way], n, f, (n, 3), first=torch.tensor([0, 3, 70, 1])))


@pytest.mark.parametrize("way", sorted({*WAYS} - {
    "a bound", "filled", "in a set", "in a dict", "by its class", "by its type", "for late heads",
    "beside a short table", "counted", "branched on", "the larger", "rounded", "text",
}))  # fmt: skip
def test_what_becomes_an_argument_is_one_kernel(way: str) -> None:
    made = [
        trace_rule(Held(WAYS[way], n, f, (n, 2), torch.tensor([0, 3, 70, 1])))
        for n, f in ((17, 0.25), (90, 0.7), (1000, 0.1))
    ]
    assert len({t.kind for t in made}) == 1
    assert all(any(map(is_number, t.tensors)) for t in made)


def test_what_stays_in_python_is_a_kernel_for_each_code() -> None:
    by = WAYS["in a set"]
    assert trace_rule(Held(by, 4)).kind == trace_rule(Held(by, 8)).kind
    assert trace_rule(Held(by, 4)).kind != trace_rule(Held(by, 5)).kind


@pytest.mark.parametrize("n", [4, 5, 340])
def test_closures_globals_defaults_and_partials(n: int) -> None:
    f = 0.3

    def window(width: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < width * width

    for mod in (
        lambda b, h, q, kv: kv < n * f,
        lambda b, h, q, kv: kv < (100 if n in {4, 8} else 200),
        lambda b, h, q, kv, n=n: kv < n * 0.3,
        functools.partial(window, n),
    ):
        right(fs.MaskRule.of(mod))
        right(Causal() & fs.MaskRule.of(mod))


def test_a_square_beyond_32_bits() -> None:
    """Its last query sees 70,000 keys; as 32 bits the square of a number of the rule wraps."""
    r, length = 70000, 80000
    layout = fs.build_layout(
        rule=lambda b, h, q, kv: (q >= kv) & ((q - kv).float() ** 2 < r * r),
        grid=fs.Grid(length, length), heads=(1, 1), block_size=2048,
    )  # fmt: skip
    assert int(layout.dense(torch.tensor([length - 1])).sum()) == r


@pytest.mark.parametrize(
    "mod",
    [
        lambda n: lambda s, b, h, q, kv: s - torch.where(kv >= 100, 5.0 if n in {4} else 0.0, 0.0),
        lambda n: lambda s, b, h, q, kv: s - torch.where(h >= 2, 3.0 if n in {4} else 0.0, 0.0),
        lambda n: lambda s, b, h, q, kv: s * (n * 0.3) + n,
    ],
)
@pytest.mark.parametrize("n", [4, 5])
def test_scores(mod: Any, n: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, 16, generator=draw) for _ in range(3))
    fs.check(q, k, v, rule=Causal(), score=mod(n)).raise_if_failed()
    trace_score(fs.ScoreRule.of(mod(n)))


SCORES: dict[str, Callable[[float], Any]] = {
    "a slope": lambda f: lambda s, b, h, q, kv: s - f * (q - kv),
    "of the distance": lambda f: lambda s, b, h, q, kv: s - f * (q - kv).abs(),
    "a decay": lambda f: lambda s, b, h, q, kv: s * torch.exp(-(q - kv) / f),
    "a power": lambda f: lambda s, b, h, q, kv: s - 2.0 ** (-f * (h + 1)) * (q - kv),
    "a logarithm": lambda f: lambda s, b, h, q, kv: s * torch.log(q + f + 1),
    "a gate": lambda f: lambda s, b, h, q, kv: s * torch.sigmoid((kv - q) / f),
    "one of two": lambda f: lambda s, b, h, q, kv: torch.where(q - kv < 20, s, -f),
    "two of it": lambda f: lambda s, b, h, q, kv: s + torch.where(q - kv < 20, f, -f),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_slope_is_one_kernel_and_right(name: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, 70, 16, generator=draw, dtype=dtype) for _ in range(3))
    kinds = set()
    for f in (0.25, 0.7, 1.3):
        score = fs.ScoreRule.of(SCORES[name](f))
        kinds.add(trace_score(score).kind)
        fs.check(q, k, v, rule=Causal(), score=score, backend="tiles").raise_if_failed()
    assert len(kinds) == 1


def test_an_integer_is_no_float_of_single_precision() -> None:
    n, length = 2**24 + 1, 4200
    rule = fs.MaskRule.of(lambda b, h, q, kv: (q - kv) ** 2 < (n if type(n) is int else float(n)))
    layout = fs.build_layout(rule=rule, grid=fs.Grid(length, length), heads=(1, 1), block_size=128)
    at = torch.arange(length)
    row = torch.tensor([0, 7, length - 1])
    want = (row[:, None] - at) ** 2 < n
    assert torch.equal(layout.dense(row)[0, 0], want)


@pytest.mark.parametrize("where", ["field", "closure"])
def test_a_sign_of_zero_is_seen(where: str) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=draw) for _ in range(3))
    z = 0.0

    @dataclass(frozen=True, eq=False)
    class Signed(fs.ScoreRule):
        zero: float

        def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return s * torch.copysign(torch.ones_like(s), torch.zeros_like(s) + self.zero * 1e-30)

    score: Any = Signed(-1.0)
    if where == "closure":
        score = fs.ScoreRule.of(
            lambda s, b, h, q, kv: s * torch.where(torch.zeros_like(s) + 1 / (s * 0 + z) > 0, 1, -1)
        )
    for z in (0.0, -0.0, 0.0):
        if where == "field":
            object.__setattr__(score, "zero", math.copysign(1e30, z))
        want = fs.reference(q, k, v, score=score).out
        got = fs.attention(q, k, v, score=score)
        assert isinstance(got, Tensor)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_what_may_be_seen_does_not_depend_on_the_default_precision() -> None:
    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv * 1.0 * 0.1 <= torch.where(q > 3, 0.1, 0.3) * q

    grid = fs.Grid(LENGTH, LENGTH)
    made = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            mod = fs.MaskRule.of(lambda *at: rule(*at))
            made.append(fs.build_layout(rule=mod, grid=grid, heads=(1, 1), block_size=16).dense())
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*made)


NUMBERS = st.one_of(
    st.integers(-(2**40), 2**40), st.integers(-9, 9), st.floats(-1e6, 1e6), st.booleans()
)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(NUMBERS, NUMBERS, st.sampled_from(sorted(_BINARY)), st.booleans())
def test_arithmetic_is_that_of_python(a: Any, b: Any, name: str, both: bool) -> None:
    compute = _BINARY[name]
    if name == "pow":
        a, b = a % 100, b % 5
    if name.endswith("shift"):
        b = b % 40 if isinstance(b, int) else b
    for one, other in ((marked(a), marked(b) if both else b), (a, marked(b))):
        try:
            want = compute(a, b)
        except (TypeError, ZeroDivisionError) as error:
            with pytest.raises(type(error)):
                compute(one, other)
            continue
        got = compute(one, other)
        assert got == want
        # A float that stands first computes by itself.
        marks = isinstance(other, Int | Float)
        if isinstance(one, Int | Float) or (type(one) is int and marks):
            assert type(got) in ((Int, Float) if type(want) in (int, float) else (type(want),))


@given(st.one_of(st.integers(), st.floats(allow_nan=False)), st.sampled_from(sorted(_UNARY)))
def test_signs_are_those_of_python(a: Any, name: str) -> None:
    if name == "invert" and type(a) is float:
        return
    assert _UNARY[name](marked(a)) == _UNARY[name](a)
    assert hash(marked(a)) == hash(a) and repr(marked(a)) == repr(a)


def test_a_window_is_still_one_argument() -> None:
    traced = trace_rule(SlidingWindow(7))
    assert [t.item() for t in traced.tensors] == [7] and traced.tensors[0].dtype == torch.int32
