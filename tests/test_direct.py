"""A kernel past its guards gives what they would let it give, and asks them where they could refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import flexsparse as fs
from flexsparse.backends import flash, routes
from flexsparse.backends.compiled import Marked
from flexsparse.backends.direct import Direct
from flexsparse.device import compiled_alone
from flexsparse.device.unguarded import backend
from flexsparse.masks import Causal, SlidingWindow

Call = tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], tables: list[Tensor], learned: list[Tensor]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Like a kernel: not all arguments are read, and one number is a length."""
    scores = q @ k.mT * k.shape[0] + tables[0]
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def drawn(seed: int, queries: int = 5, keys: int = 7) -> Call:
    draw = torch.Generator().manual_seed(seed)
    q, k, v, table = (
        torch.randn(shape, generator=draw)
        for shape in ((queries, 4), (keys, 4), (keys, 3), (keys,))
    )
    return q, k, v, [torch.zeros(2)], [table]


class Counted:
    """How often torch's guards were asked."""

    def __init__(self, function: Callable[..., Any] = attend) -> None:
        self.times = 0
        self._compiled = compiled_alone(function, dynamic=False, backend=backend())

    def __call__(self, *call: Any) -> Any:
        self.times += 1
        return self._compiled(*call)


def same(kernel: Direct, call: Call) -> None:
    for mine, true in zip(kernel(*call), attend(*call, []), strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, true)


def thrice(kernel: Direct, **sizes: int) -> None:
    for seed in range(3):
        same(kernel, drawn(seed, **sizes))


def test_the_guards_judge_the_first_call() -> None:
    guards = Counted()
    kernel = Direct(guards)
    thrice(kernel)
    assert guards.times == 1


def test_sizes_that_vary_belong_to_a_form() -> None:
    """Their marks stand on views, which only the guards see."""
    guards = Counted()
    marked = Marked(guards, (0, 2, 4, 7))
    for keys in (7, 9, 12):
        kernel = Direct(marked)
        thrice(kernel, keys=keys)
    assert guards.times == 3


def test_an_output_alone() -> None:
    def alone_(*call: Any) -> tuple[Tensor, None]:
        return attend(*call)[0], None

    guards = Counted(alone_)
    kernel = Direct(guards)
    for seed in range(3):
        out, lse = kernel(*drawn(seed))
        assert lse is None
        torch.testing.assert_close(out, attend(*drawn(seed), [])[0])
    assert guards.times == 1


def test_one_tensor_in_two_places_is_asked_until_they_are_two() -> None:
    guards = Counted()
    kernel = Direct(guards)
    for seed in range(3):
        q, k, _, lists, tables = drawn(seed)
        same(kernel, (q, k, k, lists, tables))
    for seed in range(3):
        q, k, _, lists, tables = drawn(seed)
        same(kernel, (q, k, k.clone(), lists, tables))
    assert guards.times == 4


@pytest.mark.parametrize("what", ["argument", "output", "runs"])
def test_what_cannot_be_told_is_asked_ever_again(what: str) -> None:
    """A tensor that nobody gave, one that no run gave, and one run of two."""
    besides = torch.ones(())

    def reads_more(*call: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*call)
        return out * besides, lse

    guards = Counted(reads_more if what == "argument" else attend)

    def kernel(*call: Any) -> tuple[Tensor, Tensor]:
        out, lse = guards(*call)
        if what == "runs":
            guards(*call)
        return (out * besides if what == "output" else out), lse

    direct = Direct(kernel)
    for i in range(3):
        besides = torch.full((), float(i))
        out, _ = direct(*drawn(i))
        true, _ = attend(*drawn(i), [])
        torch.testing.assert_close(out, true if what == "runs" else true * i)
    assert guards.times == 3 * (1 + (what == "runs"))


def test_settings_of_torch_are_asked_for() -> None:
    guards = Counted()
    kernel = Direct(guards)
    same(kernel, drawn(0))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        thrice(kernel)
        assert guards.times == 2
    finally:
        torch.set_float32_matmul_precision(before)
    thrice(kernel)
    assert guards.times == 3


class Silent(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [False, True])
def test_under_a_mode_the_guards_are_asked(first: bool) -> None:
    guards = Counted()
    kernel = Direct(guards)
    if not first:
        same(kernel, drawn(0))
    with Silent():
        same(kernel, drawn(1))
        same(kernel, drawn(1))
    asked = guards.times
    assert asked == 2 + (not first)
    thrice(kernel)
    assert guards.times == asked + first


def test_a_default_device_is_no_such_mode() -> None:
    guards = Counted()
    kernel = Direct(guards)
    for seed in range(3):
        with torch.device("cpu"):
            same(kernel, drawn(seed))
    assert guards.times == 1


def test_where_nothing_compiled_shall_run_nothing_does() -> None:
    guards = Counted()
    kernel = Direct(guards)
    same(kernel, drawn(0))
    torch.compiler.set_stance("force_eager")
    try:
        same(kernel, drawn(1))
    finally:
        torch.compiler.set_stance("default")
    same(kernel, drawn(2))
    assert guards.times == 2


def test_graphs_of_inductors_own_are_left_to_the_guards() -> None:
    """Torch counts calls by them."""
    with torch._inductor.config.patch("triton.cudagraphs", True):
        guards = Counted()
        kernel = Direct(guards)
        thrice(kernel)
    assert guards.times == 3


def test_another_default_of_torch_compiles() -> None:
    if not hasattr(torch.compiler, "set_default_backend"):
        pytest.skip("this torch has no such default")
    seen: list[int] = []

    def other(traced: torch.fx.GraphModule, examples: list[Any]) -> Any:
        seen.append(len(examples))
        return traced.forward

    torch.compiler.set_default_backend(other)
    try:
        guards = Counted()
        kernel = Direct(guards)
        thrice(kernel)
    finally:
        torch.compiler.set_default_backend(None)
    assert seen and guards.times == 3


def test_tensors_of_a_call_can_be_swapped_later() -> None:
    """As a module of torch moves parameters that are of a subclass."""
    call = drawn(0)
    same(Direct(Counted()), call)
    for t in (*call[:3], *call[4]):
        torch.utils.swap_tensors(t, torch.zeros(3))
    assert not call[0].any()


def test_a_first_call_that_fails_is_none() -> None:
    guards, failing = Counted(), [True]

    def kernel(*call: Any) -> Any:
        if failing.pop():
            raise ValueError("no")
        failing.append(False)
        return guards(*call)

    direct = Direct(kernel)
    with pytest.raises(ValueError, match="no"):
        direct(*drawn(0))
    failing.append(False)
    thrice(direct)
    assert guards.times == 1


def test_a_call_within_a_call_is_heard_apart() -> None:
    inner, outer = Direct(Counted()), Counted()

    def kernel(*call: Any) -> Any:
        same(inner, drawn(9))
        return outer(*call)

    direct = Direct(kernel)
    thrice(direct)
    assert outer.times == 1


def test_no_form_is_one_too_many_for_torch() -> None:
    """It refuses the ninth of a code object."""
    guards = Counted()
    for keys in range(2, 14):
        call = drawn(keys, keys=keys)
        for mine, true in zip(guards(*call, []), attend(*call, []), strict=True):
            torch.testing.assert_close(mine, true)


@pytest.fixture
def firsts(monkeypatch: pytest.MonkeyPatch) -> list[Direct]:
    """Kernels whose guards judged a first call."""
    asked: list[Direct] = []
    run = Direct._asked

    def noted(self: Direct, *call: Any) -> Any:
        asked.append(self)
        return run(self, *call)

    monkeypatch.setattr(Direct, "_asked", noted)
    return asked


@pytest.mark.parametrize("pack", ["identity", "fold"])
def test_a_plan_runs_past_the_guards(
    pack: Any, firsts: list[Direct], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's FlexAttention, compiled; remembered as on a device."""
    monkeypatch.setattr(routes, "remembers", lambda work: not torch.compiler.is_compiling())
    draw = torch.Generator().manual_seed(0)

    def qkv() -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (torch.randn(2, h, 192, 16, generator=draw) for h in (4, 2, 2))
        return q, k, v

    rule = Causal() & SlidingWindow(70)
    with torch.no_grad():
        plan = fs.make_plan(*qkv(), rule=rule, backend="flex", pack=pack)
        for _ in range(4):
            given = qkv()
            found = plan.run(*given).out.double()
            true = fs.reference(*given, rule=rule).out.double()
            torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-5)
    (kernel,) = firsts
    assert kernel._known is not None


@pytest.mark.gpu
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("queries", [1, None])
@pytest.mark.parametrize("backend", ["flex", "flash"])
def test_on_a_device_all_lengths_run_past_the_guards(
    backend: Any, queries: int | None, lse: bool, firsts: list[Direct], device: torch.device
) -> None:
    """The same bits as by the guards; from the second length on sizes are marked as varying."""
    if backend == "flash" and (queries or not flash.installed()):
        pytest.skip("FlashAttention-4 takes no single query, or is not installed")
    draw = torch.Generator(device).manual_seed(0)
    lengths = (512, 640, 1024)
    for length in lengths:
        shapes = ((8, queries or length), (2, length), (2, length))
        q, k, v = (
            torch.randn(2, h, n, 128, device=device, dtype=torch.bfloat16, generator=draw)
            for h, n in shapes
        )
        pages = torch.arange(0, length // 128, 2, device=device).expand(
            2, 2, -(-q.shape[2] // 128), -1
        )
        select = fs.Selection.from_indices(
            pages, q_len=q.shape[2], kv_len=length, kv_block=128, q_block=1 if queries else 128
        )
        with torch.no_grad():
            plan = fs.make_plan(q, k, v, rule=Causal(), select=select, backend=backend)
            first, *others = [
                plan.run(q, k, v, plan.layout(select), return_lse=lse) for _ in range(4)
            ]
            true = fs.reference(q, k, v, rule=Causal(), select=select)
        for other in others:
            assert torch.equal(other.out, first.out)
            assert (other.lse is None) == (first.lse is None) == (not lse)
            if other.lse is not None and first.lse is not None:
                assert torch.equal(other.lse, first.lse)
        torch.testing.assert_close(first.out.double(), true.out.double(), atol=1e-2, rtol=1e-2)
    assert len(firsts) == len(lengths)
    assert all(kernel._known is not None for kernel in firsts)
