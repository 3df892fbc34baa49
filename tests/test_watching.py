"""A rule that is as it was is known at once; whatever of it changes is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Causal, Document, SlidingWindow
from flexsparse.watching import watch


def closure() -> tuple[Callable[..., Tensor], Callable[[int], None]]:
    """A mod over a variable, and who sets it."""
    size = 5

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    def change(to: int) -> None:
        nonlocal size
        size = to

    return near, change


@dataclass(frozen=True, eq=False)
class Near(fs.MaskRule):
    size: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.size)


def _default() -> tuple[Any, Callable[[], None]]:
    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any, size: Any = 5) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    return near, lambda: setattr(near, "__defaults__", (9,))


def _cell() -> tuple[Any, Callable[[], None]]:
    near, change = closure()
    return near, lambda: change(9)


def _inside() -> tuple[Any, Callable[[], None]]:
    near, change = closure()
    return Causal() & fs.MaskRule.of(near), lambda: change(9)


def _tensor() -> tuple[Any, Callable[[], None]]:
    ids = torch.arange(32) // 8

    def change() -> None:
        ids.zero_()

    return Causal() & Document(ids), change


def _field() -> tuple[Any, Callable[[], None]]:
    rule = Near(5)
    return rule & SlidingWindow(20), lambda: object.__setattr__(rule, "size", 9)


def _code() -> tuple[Any, Callable[[], None]]:
    """What a notebook does to a function of a module that it loads anew."""

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 5)

    def wider(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 9)

    return near, lambda: setattr(near, "__code__", wider.__code__)


def _method() -> tuple[Any, Callable[[], None]]:
    """And to a class."""

    @dataclass(frozen=True, eq=False)
    class Reloaded(Near):
        def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & (q_idx - kv_idx < self.size)

    def wider(self: Any, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.size + 4)

    return Reloaded(5) & SlidingWindow(20), lambda: setattr(Reloaded, "__call__", wider)


@pytest.mark.parametrize("make", [_default, _cell, _inside, _tensor, _field, _code, _method])
def test_a_change_is_seen(make: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    rule, change = make()
    q, k, v = torch.randn(3, 1, 1, 32, 16, generator=torch.Generator().manual_seed(0))
    for changed in (False, True):
        if changed:
            before = watch(rule)
            assert before is not None and watch(rule) is before
            change()
            assert not before.unchanged()
        for _ in range(2):
            out = fs.attention(q, k, v, rule=rule)
            torch.testing.assert_close(
                out.double(), fs.reference(q, k, v, rule=rule).out, atol=1e-5, rtol=0
            )


def test_what_reads_more_than_it_holds_is_not_watched() -> None:
    sizes = [5]
    rule = fs.MaskRule.of(lambda b, h, q, kv: q - kv < sizes[0])
    assert watch(rule) is None


def test_a_tensor_that_keeps_no_count_is_not_watched() -> None:
    with torch.inference_mode():
        ids = torch.zeros(8, dtype=torch.int32)
    assert watch(Document(ids)) is None


def test_many_rules_are_not_kept_for_ever() -> None:
    from flexsparse import watching

    for size in range(1, 40):
        assert watch(SlidingWindow(size)) is not None
    assert len(watching._watches) <= watching._KEPT
