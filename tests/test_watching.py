"""A rule that is as it was is known at once; whatever of it changes is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.errors import LayoutError
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


SIZE = [5]


@dataclass
class Sizes:
    """Asked by name, sign or index, it reads what nobody holds."""

    unit: int = 1

    @property
    def near(self) -> int:
        return SIZE[0]

    def __getitem__(self, at: int) -> int:
        return SIZE[at]

    def __rsub__(self, other: Tensor) -> Tensor:
        return other - SIZE[0]


class Number(int):
    near: int


def _imported() -> tuple[Any, Callable[[int], None]]:
    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        from tests.test_watching import SIZE

        return q_idx - kv_idx < SIZE[0]

    return near, lambda to: SIZE.__setitem__(0, to)


def _indexed() -> tuple[Any, Callable[[int], None]]:
    sizes = Sizes()
    return lambda b, h, q, kv: q - kv < sizes[0], lambda to: SIZE.__setitem__(0, to)


def _signed() -> tuple[Any, Callable[[int], None]]:
    sizes = Sizes()
    return lambda b, h, q, kv: q - kv - sizes < 0, lambda to: SIZE.__setitem__(0, to)


def _handed_on() -> tuple[Any, Callable[[int], None]]:
    sizes = Sizes()

    def of(asked: Sizes) -> int:
        return asked.near

    return lambda b, h, q, kv: q - kv < of(sizes), lambda to: SIZE.__setitem__(0, to)


def _attribute_of_a_tensor() -> tuple[Any, Callable[[int], None]]:
    ids: Any = torch.zeros(32)
    ids.near = 5
    return lambda b, h, q, kv: (q - kv < ids.near) & (ids[kv] == 0), lambda to: setattr(
        ids, "near", to
    )


def _attribute_of_a_number() -> tuple[Any, Callable[[int], None]]:
    one = Number(1)
    one.near = 5
    return lambda b, h, q, kv: q - kv < one.near, lambda to: setattr(one, "near", to)


@pytest.mark.parametrize(
    "make",
    [_imported, _indexed, _signed, _handed_on, _attribute_of_a_tensor, _attribute_of_a_number],
)
def test_what_is_read_elsewhere_is_read_anew(
    make: Callable[[], tuple[Any, Callable[[int], None]]],
) -> None:
    mod, change = make()
    rule = fs.MaskRule.of(mod)
    at = torch.arange(32)
    q, k, v = torch.randn(3, 1, 1, 32, 16, generator=torch.Generator().manual_seed(0))
    for size in (5, 21):
        change(size)
        assert watch(rule) is None
        layout = fs.build_layout(rule=rule, grid=fs.Grid(32, 32), heads=(1, 1), block_size=16)
        assert torch.equal(layout.dense()[0, 0], at[:, None] - at < size)
        out, want = fs.attention(q, k, v, rule=rule), fs.reference(q, k, v, rule=rule).out
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("other", ["turned", "shorter", "elsewhere"])
def test_other_data_of_a_tensor_is_seen(other: str) -> None:
    seen = torch.zeros(32, 32, dtype=torch.bool)
    seen[:, :1] = seen[:9] = True
    rule = fs.MaskRule.of(lambda b, h, q, kv: seen[q % seen.shape[0], kv])
    q, k, v = torch.randn(3, 1, 1, 32, 16, generator=torch.Generator().manual_seed(0))
    plan = fs.make_plan(q, k, v, rule=rule, tile=16, backend="tiles")
    fs.attention(q, k, v, rule=rule, tile=16, backend="tiles")
    data = {"turned": seen.t(), "shorter": seen[:10], "elsewhere": seen.flip(0)}
    seen.data = data[other]
    out = fs.attention(q, k, v, rule=rule, tile=16, backend="tiles")
    want = fs.reference(q, k, v, rule=rule).out
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    with pytest.raises(LayoutError, match="has changed"):
        plan.run(q, k, v)


def test_other_attributes_of_a_record_are_seen() -> None:
    sizes = Near(5)
    rule = fs.MaskRule.of(lambda b, h, q, kv: q - kv < sizes.size)
    assert (before := watch(rule)) is not None
    object.__setattr__(sizes, "__dict__", {"size": 9})
    assert not before.unchanged()


def test_a_tensor_that_keeps_no_count_is_not_watched() -> None:
    with torch.inference_mode():
        ids = torch.zeros(8, dtype=torch.int32)
    assert watch(Document(ids)) is None


def test_many_rules_are_not_kept_for_ever() -> None:
    from flexsparse import watching

    for size in range(1, 40):
        assert watch(SlidingWindow(size)) is not None
    assert len(watching._watches) <= watching._KEPT
