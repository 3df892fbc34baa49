"""The gallery as fused kernels: one kernel a kind of rule, whatever its parameters, and the right result."""

from __future__ import annotations

import pytest
import test_gallery_images as images
import test_gallery_scores as scores
import test_gallery_sequences as sequences
import torch
from oracle import random_tensors

import flexsparse as fs
from flexsparse.masks import (
    AShape,
    BlockDiagonal,
    Causal,
    Neighborhood,
    PerHead,
    ShiftedWindow,
    SlidingTile,
    SlidingWindow,
)
from flexsparse.rules import trace_rule
from flexsparse.settling import settled

RULES: dict[str, fs.MaskRule] = {name: make(200)[0] for name, make in sequences.RULES.items()}
RULES |= {f"{name} image": make((10, 20))[0] for name, make in images.MAKES.items()}
RULES |= {f"{name} video": make((5, 5, 8))[0] for name, make in images.MAKES.items()}
SCORES = {name: make(200)[0] for name, make in scores.SCORES.items()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Neighborhood((8, 8), (3, 3)), Neighborhood((9, 12), (5, 4))),
        (SlidingTile((8, 8), (2, 2), (3, 1)), SlidingTile((9, 12), (3, 4), (1, 3))),
        (ShiftedWindow((8, 8), (4, 4), (2, 2)), ShiftedWindow((6, 9), (3, 3), (1, 0))),
        (
            PerHead((SlidingWindow(3), AShape(1, 4) & Causal())),
            PerHead((SlidingWindow(30), AShape(2, 40) & Causal())),
        ),
        (BlockDiagonal(3), BlockDiagonal(7)),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_other_numbers_are_the_same_kernel(one: fs.MaskRule, other: fs.MaskRule) -> None:
    """Also those inside tuples, and those of rules inside a rule."""
    assert trace_rule(one).kind == trace_rule(other).kind


@pytest.mark.parametrize("name", [*RULES, *SCORES])
def test_a_call_need_not_trace_a_rule_again_to_know_it(name: str) -> None:
    """What it holds says all: a second call with the same rule finds its plan by that."""
    rule = RULES[name] if name in RULES else SCORES[name]
    assert settled(rule)


def close(device: torch.device, rule: fs.MaskRule, score: fs.ScoreRule | None) -> None:
    q, k, v = random_tensors(200, 200, kv_heads=2)
    options = {"rule": rule, "score": score}
    wanted = fs.reference(q, k, v, **options).out.detach()
    q, k, v = (x.to(device) for x in (q, k, v))
    with torch.no_grad():
        got = fs.attention(q, k, v, **options, backend="flex")
    torch.testing.assert_close(got.cpu().double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_rule_fuses(name: str, device: torch.device) -> None:
    close(device, RULES[name], None)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_a_score_fuses(name: str, device: torch.device) -> None:
    close(device, Causal(), SCORES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_a_rule_fuses_on_a_gpu(name: str, device: torch.device) -> None:
    close(device, RULES[name], None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCORES)
def test_a_score_fuses_on_a_gpu(name: str, device: torch.device) -> None:
    close(device, Causal(), SCORES[name])
