"""A kernel called past torch's guards gives what the guards would let it give, in any order of forms."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexsparse.intervals import compiled


def code(cells: Tensor, numbers: Tensor, *read: Tensor) -> Tensor:
    """Like a judge: elements of tables, whose lengths are numbers of the call."""
    wide, start, *lengths = numbers.unbind(0)
    at = cells // wide
    found = cells + start
    for table, length in zip(read, lengths, strict=True):
        found = found + torch.ops.aten.index.Tensor(table, [at % length])
    return torch.where(cells % 3 == 0, found, -found)


def drawn(seed: int, *lengths: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    cells, *read = (torch.randint(0, 99, (n,), generator=generator) for n in lengths)
    wide, start = torch.randint(1, 9, (2,), generator=generator).tolist()
    return cells, torch.tensor([wide, start, *lengths[1:]]), *read


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each call through torch's guards, how many arguments it had."""
    calls: list[int] = []
    compile_ = torch.compile

    def counting(*of: Any, **options: Any) -> Callable[..., Tensor]:
        run = compile_(*of, **options)

        def counted(*args: Tensor) -> Tensor:
            calls.append(len(args))
            found: Tensor = run(*args)
            return found

        return counted

    monkeypatch.setattr(torch, "compile", counting)
    return calls


def kernel_of(*args: Tensor) -> Callable[..., Tensor]:
    traced = make_fx(code)(*args).forward

    def judged(*args: Tensor) -> Tensor:
        found: Tensor = traced(*args)
        return found

    return compiled.as_kernel(judged)


def test_interleaved_forms_give_what_the_code_gives(guarded: list[int]) -> None:
    kernel = kernel_of(*drawn(0, 7, 5, 6))
    forms = [(40, 5, 6), (41, 5, 6), (40, 6, 5), (40, 6, 6), (5, 5, 5), (64, 40, 64)]
    for seed, lengths in [*product(range(3), forms), *product(range(3, 6), forms[::-1])]:
        args = drawn(seed, *lengths)
        assert torch.equal(kernel(*args), code(*args))
    assert len(guarded) == len(forms)
    assert not kernel(*args).requires_grad


def test_a_form_is_more_than_its_lengths(guarded: list[int]) -> None:
    kernel = kernel_of(*drawn(0, 7, 8))
    cells, numbers, _ = drawn(1, 30, 8)
    table = torch.arange(16)
    tables = [table[:8], table[1:9], table[::2], table[:8].to(torch.int32), table[:8].flip(0)]
    for _, of in product(range(3), tables):
        assert torch.equal(kernel(cells, numbers, of), code(cells, numbers, of))
    # The last is of the form of the first.
    assert len(guarded) == len(tables) - 1


def test_one_tensor_in_two_places_is_no_form_for_two(guarded: list[int]) -> None:
    kernel = kernel_of(*drawn(0, 7, 8, 8))
    cells, numbers, one, other = drawn(1, 30, 8, 8)
    for read in ((one, one), (one, other), (one, one), (other, one)):
        assert torch.equal(kernel(cells, numbers, *read), code(cells, numbers, *read))
    # Only what was told apart was kept.
    assert len(guarded) == 2


def test_forms_kept_are_bounded(guarded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST", 2)
    kernel = kernel_of(*drawn(0, 7, 8))
    for _, n in product(range(2), range(2, 6)):
        args = drawn(n, n * 10, 8)
        assert torch.equal(kernel(*args), code(*args))
    assert len(guarded) == 8


def test_no_argument_is_kept() -> None:
    kernel = kernel_of(*drawn(0, 7, 8))
    args = drawn(1, 50, 8)
    for _ in range(2):
        kernel(*args)
    gone = [weakref.ref(x) for x in args]
    del args
    assert not any(x() is not None for x in gone)


def test_threads_do_not_take_each_others_runs() -> None:
    kernel = kernel_of(*drawn(0, 7, 8))
    calls = [drawn(seed, 10 + seed % 5, 8 + seed % 3) for seed in range(60)]
    with ThreadPoolExecutor(4) as pool:
        for args, found in zip(calls, pool.map(lambda args: kernel(*args), calls), strict=True):
            assert torch.equal(found, code(*args))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced runs as it is."""
    monkeypatch.setattr(torch._inductor, "compile", lambda traced, examples: traced.forward)


@pytest.mark.usefixtures("traced")
def test_any_number_of_kernels_stand_beside_each_other() -> None:
    """They are closures of one code object, of which torch compiles eight."""
    args = drawn(0, 7, 5, 6)
    for _ in range(12):
        assert torch.equal(kernel_of(*args)(*args), code(*args))


@pytest.mark.usefixtures("traced")
def test_any_number_of_forms_of_one_kernel() -> None:
    """A length of 1 is a constant to torch: sixteen forms of four tables."""
    kernel = kernel_of(*drawn(0, 7, 5, 5, 5, 5))
    for lengths in product((1, 5), repeat=4):
        args = drawn(1, 7, *lengths)
        assert torch.equal(kernel(*args), code(*args))
