"""FlexAttention's own functions as they are: what people already have is a rule, or a score."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from oracle import BATCH, HEADS, Pair, defined_pairs, dense, random_tensors
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import flexsparse as fs
from flexsparse.masks import AttentionSink, Causal, SlidingWindow, Softcap


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
