"""Launches past Triton's own dispatch: what is one kind of launch, and what each kernel is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsparse.errors import ShapeError
from flexsparse.kernels import launching
from flexsparse.kernels.launching import dispatch


class Compiled:
    """Of one kind of launch; notes down what it is given directly."""

    def __init__(self) -> None:
        self.given: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        assert len(grid) == 3
        return lambda *args: self.given.append((grid, *args))


class Kernel:
    """Takes x, y and n, then the constants WIDTH and EVEN; notes down what Triton would dispatch."""

    def __init__(self, result: Any = Compiled) -> None:
        names = {"x": False, "y": False, "n": False, "WIDTH": True, "EVEN": True}
        self.params = [SimpleNamespace(name=k, is_constexpr=v) for k, v in names.items()]
        self.pre_run_hooks: list[object] = []
        self.made: list[Any] = []
        self.result = result

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: object, **named: object) -> Any:
            self.made.append(self.result())
            return self.made[-1]

        return run


@pytest.fixture(autouse=True)
def _none_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launching._kept.clear()
    monkeypatch.setattr(launching, "_current_device", lambda: 0)
    yield
    launching._kept.clear()


def tensor(dtype: torch.dtype = torch.int32, away: int = 0) -> Tensor:
    """Stands ``away`` entries behind a multiple of 16 bytes."""
    made = torch.zeros(64, dtype=dtype)
    first = -made.data_ptr() % 16 // made.itemsize
    return made[first + away :][:8]


X, Y = tensor(), tensor()
PLAIN: dict[str, Any] = {"x": X, "y": Y, "n": 48, "WIDTH": 8, "EVEN": True, "num_warps": 4}


def launch(kernel: Kernel, grid: tuple[int, ...] = (5,), **other: object) -> None:
    given = PLAIN | other
    args = [given.pop(name) for name in ("x", "y", "n")]
    dispatch(kernel, grid, *args, **given)


SAME = [{}, {"n": 64}, {"n": 2**31 - 16}, {"x": tensor()}, {"x": X[None]}, {"x": tensor(away=4)}]


@pytest.mark.parametrize("other", SAME)
def test_a_kind_is_dispatched_once(other: dict[str, Any]) -> None:
    kernel = Kernel()
    launch(kernel)
    launch(kernel, (3, 2), **other)
    assert len(kernel.made) == 1
    given = PLAIN | other
    (got,) = kernel.made[0].given
    assert got[0] == (3, 2, 1)
    assert got[1] is given["x"]
    assert got[2] is Y
    assert got[3:] == (given["n"], 8, True)


OTHER: list[dict[str, Any]] = [
    {"x": tensor(torch.int64)},
    {"x": tensor(torch.float32)},
    {"x": tensor(away=1)},
    {"y": None},
    {"y": 2},
    {"n": 49},
    {"n": 1},
    {"n": 0},
    {"n": -16},
    {"n": 2**31},
    {"n": -(2**31) - 16},
    {"n": 48.0},
    {"n": True},
    {"n": None},
    {"WIDTH": 16},
    {"EVEN": False},
    {"num_warps": 8},
    {"num_stages": 2},
]


@pytest.mark.parametrize("other", OTHER, ids=str)
def test_another_kind_is_dispatched_anew(other: dict[str, Any]) -> None:
    kernel = Kernel()
    for _ in range(2):
        launch(kernel)
        launch(kernel, **other)
    assert len(kernel.made) == 2
    assert [len(made.given) for made in kernel.made] == [1, 1]


def test_all_kinds_differ_from_each_other() -> None:
    kernel = Kernel()
    for other in OTHER:
        launch(kernel, **other)
    assert len(kernel.made) == len(OTHER)


def test_floats_are_of_one_kind() -> None:
    kernel = Kernel()
    launch(kernel, n=0.5)
    launch(kernel, n=1.0)
    assert len(kernel.made) == 1
    assert kernel.made[0].given[0][3] == 1.0


def test_a_parameter_is_a_tensor() -> None:
    kernel = Kernel()
    for away in (0, 1, 0):
        held = torch.nn.Parameter(tensor(torch.float32, away), requires_grad=False)
        launch(kernel, x=held)
    assert len(kernel.made) == 2


def test_each_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launch(kernel)
    monkeypatch.setattr(launching, "_current_device", lambda: 1)
    launch(kernel)
    launch(kernel)
    assert [len(made.given) for made in kernel.made] == [0, 1]


class Elsewhere(Tensor):
    """Says that it is on another device."""

    def get_device(self) -> int:
        return 3


def test_a_launch_is_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current device, whose stream does not wait for what made them."""
    current, entered = [0], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(launching, "_current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = Kernel()
    for x in (X, X.as_subclass(Elsewhere), X, X.as_subclass(Elsewhere)):
        launch(kernel, x=x)
    assert entered == [3, 3] and current == [0]
    assert [len(made.given) for made in kernel.made] == [1, 1]


@pytest.mark.parametrize("grid", [(5, 2**16), (5, 1, 2**16)])
def test_more_lists_than_a_launch_takes_are_refused(grid: tuple[int, ...]) -> None:
    kernel = Kernel()
    with pytest.raises(ShapeError, match="65536 programs .*: split the batch"):
        launch(kernel, grid)
    assert not kernel.made
    launch(kernel, (2**16, *[2**16 - 1] * (len(grid) - 1)))


def test_each_kernel_has_its_own() -> None:
    first, second = Kernel(), Kernel()
    for kernel in (first, second, first):
        launch(kernel)
    assert [len(first.made), len(second.made)] == [1, 1]
    assert [len(first.made[0].given), len(second.made[0].given)] == [1, 0]


def test_constants_are_given_in_the_order_of_the_kernel() -> None:
    kernel = Kernel()
    for _ in range(2):
        dispatch(kernel, (1,), X, Y, 48, num_warps=4, EVEN=False, WIDTH=8)
    assert kernel.made[0].given[0][4:] == (8, False)


@pytest.mark.parametrize("result", [lambda: None, object], ids=["interpreted", "unknown"])
def test_what_compiles_nothing_is_always_dispatched(result: Any) -> None:
    kernel = Kernel(result)
    for _ in range(3):
        launch(kernel)
    assert len(kernel.made) == 3


def test_arguments_and_constants_that_mix_are_always_dispatched() -> None:
    kernel = Kernel()
    for _ in range(2):
        dispatch(kernel, (1,), X, Y, n=48, WIDTH=8, EVEN=True)
        dispatch(kernel, (1,), X, Y, 48, 8, EVEN=True)
    assert len(kernel.made) == 4


def test_hooks_before_a_run_are_obeyed() -> None:
    kernel = Kernel()
    launch(kernel)
    kernel.pre_run_hooks.append(print)
    launch(kernel)
    assert [made.given for made in kernel.made] == [[], []]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST", 3)
    kernel = Kernel()
    for width in range(10):
        launch(kernel, WIDTH=width)
        assert len(launching._kept) <= 3
    launch(kernel, WIDTH=9)
    assert len(kernel.made) == 10
