"""Each operation on intervals holds every value that torch computes from values within them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.address import Identity
from flexsparse.coverage import Span, every_tile
from flexsparse.intervals import Judge
from flexsparse.intervals.arithmetic import operate
from flexsparse.intervals.interval import Interval, cast, exactly, ranged
from flexsparse.intervals.tables import Table
from flexsparse.program import mask_program
from flexsparse.rules import as_rule

CPU = torch.device("cpu")
aten = torch.ops.aten

TWO: dict[str, Any] = {
    "+": aten.add.Tensor, "-": aten.sub.Tensor, "*": aten.mul.Tensor,
    "//": aten.floor_divide.default, "%": aten.remainder.Tensor, "fmod": aten.fmod.Tensor,
    "minimum": aten.minimum.default, "maximum": aten.maximum.default,
    "<": aten.lt.Tensor, "<=": aten.le.Tensor, ">": aten.gt.Tensor, ">=": aten.ge.Tensor,
    "==": aten.eq.Tensor, "!=": aten.ne.Tensor, "&": aten.bitwise_and.Tensor,
    "/": aten.div.Tensor, "and": aten.logical_and.default, "xor": aten.logical_xor.default,
    "or": aten.logical_or.default,
}  # fmt: skip
WITH_NUMBER: dict[str, Any] = {
    "rsub": (aten.rsub.Scalar, 5), "% 7": (aten.remainder.Scalar, 7),
    "% -5": (aten.remainder.Scalar, -5), "// -3": (aten.floor_divide.default, -3),
    "& 7": (aten.bitwise_and.Scalar, 7), "& 12": (aten.bitwise_and.Scalar, 12),
    "<< 3": (aten.__lshift__.Scalar, 3), ">> 2": (aten.__rshift__.Scalar, 2),
    "** 2": (aten.pow.Tensor_Scalar, 2), "> 0.5": (aten.gt.Scalar, 0.5),
    "* 0.1": (aten.mul.Tensor, 0.1), "clamp": (aten.clamp.default, -3, 9),
}  # fmt: skip
ONE: dict[str, Any] = {
    "neg": aten.neg.default, "abs": aten.abs.default, "~": aten.bitwise_not.default,
    "not": aten.logical_not.default, "1 /": aten.reciprocal.default, "sqrt": aten.sqrt.default,
}  # fmt: skip


def intervals(n: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    low = torch.randint(-25, 25, (n,), generator=draw)
    width = torch.randint(0, 12, (n,), generator=draw)
    return low, low + width * (torch.rand(n, generator=draw) < 0.8)


def holds(func: Any, operands: list[tuple[Tensor, Tensor]], numbers: tuple[Any, ...]) -> float:
    """Checks every tile by all its values; gives the share of tiles of which something is known."""
    failing: list[Tensor] = []
    given = [ranged(*x) for x in operands]
    found = operate(func, (*given, *numbers), {}, CPU, failing.append)
    n = len(operands[0][0])
    low, high = (x.expand(n) for x in (found.low, found.high))
    may_fail = torch.zeros(n, dtype=torch.bool)
    for doubt in failing:
        may_fail = may_fail | doubt
    for i in range(n):
        values = [torch.arange(int(a[i]), int(b[i]) + 1) for a, b in operands]
        meshed = torch.meshgrid(*values, indexing="ij")
        try:
            result = func(*meshed, *numbers).double()
        except RuntimeError as error:
            assert "ZeroDivision" in str(error)
            assert may_fail[i]
            continue
        if low[i].isnan():
            assert high[i].isnan()
            continue
        assert not result.isnan().any()
        assert low[i] <= result.min(), (i, [v.tolist() for v in values])
        assert result.max() <= high[i], (i, [v.tolist() for v in values])
    return float((~low.isnan()).double().mean())


@pytest.mark.parametrize("name", TWO)
def test_two_operands(name: str) -> None:
    operands = [intervals(400, 1), intervals(400, 2)]
    assert holds(TWO[name], operands, ()) > 0.2


@pytest.mark.parametrize("name", WITH_NUMBER)
def test_an_operand_and_a_number(name: str) -> None:
    func, *numbers = WITH_NUMBER[name]
    assert holds(func, [intervals(400, 3)], tuple(numbers)) > 0.2


@pytest.mark.parametrize("name", ONE)
def test_one_operand(name: str) -> None:
    assert holds(ONE[name], [intervals(400, 4)], ()) > 0.2


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.bool])
def test_a_cast(dtype: torch.dtype) -> None:
    for scale in (1, 40, 701, 12345):
        low, high = (x * scale for x in intervals(200, scale))
        found = cast(ranged(low, high), dtype)
        for i in range(200):
            values = torch.arange(int(low[i]), int(high[i]) + 1, max(1, scale // 8))
            if not found.low[i].isnan():
                converted = values.to(dtype).double()
                assert found.low[i] <= converted.min()
                assert converted.max() <= found.high[i]


@pytest.mark.parametrize(("factor", "decided"), [(46340, True), (46341, False)])
def test_what_overflows_32_bits_is_unknown(factor: int, decided: bool) -> None:
    """The host counts in 64 bits and a kernel in 32: where they disagree neither is believed."""
    grid, span = fs.Grid(1, 1, q_offset=46341), Span(1, 1, 16, 16)
    rule = as_rule(lambda b, h, q, kv: q * factor > 0)
    program = mask_program(Identity(1, 1), grid, rule, None, None)
    verdicts = Judge(program, grid, span, CPU).tiles(every_tile(1, 1, span, CPU))
    assert bool(verdicts.full.all()) == decided
    assert not verdicts.empty.any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool], ids=str)
def test_extremes_over_a_range_are_exact(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    table = torch.randint(0, 1000, (3, 333), generator=draw)
    table[:, -1] = 1000
    table = table > 990 if dtype == torch.bool else table.to(dtype)
    ends = torch.randint(-333, 333, (2, 3000), generator=draw).sort(0).values
    same = torch.arange(3000) % 3
    narrow = torch.arange(3000) % 2 == 0
    ends[1] = torch.where(narrow, (ends[0] + torch.arange(3000) % 70).clamp(max=332), ends[1])
    found = Table(table, lambda _: None)[exactly(same), ranged(ends[0], ends[1])]
    for i in range(3000):
        read = table[same[i], torch.arange(int(ends[0, i]), int(ends[1, i]) + 1)].double()
        crosses = ends[0, i] < 0 <= ends[1, i]
        # What wraps around is taken for the whole axis.
        wanted = table[same[i]].double() if crosses else read
        assert (found.low[i], found.high[i]) == (wanted.min(), wanted.max())


@pytest.mark.parametrize("shape", [(20, 30), (1, 7), (5, 6, 9)], ids=str)
def test_extremes_over_a_box_hold(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(6)
    table = torch.randn(shape, generator=draw)
    first = [torch.randint(0, n, (500,), generator=draw) for n in shape]
    width = [torch.randint(0, 6, (500,), generator=draw) for _ in shape]
    last = [(a + w).clamp(max=n - 1) for a, w, n in zip(first, width, shape, strict=True)]
    index = tuple(ranged(a, b) for a, b in zip(first, last, strict=True))
    found = Table(table, lambda _: None)[index]
    for i in range(500):
        box = table[
            tuple(slice(int(a[i]), int(b[i]) + 1) for a, b in zip(first, last, strict=True))
        ]
        assert found.low[i] <= box.min()
        assert box.max() <= found.high[i]
        if all(a[i] + 1 >= b[i] for a, b in zip(first, last, strict=True)):
            assert (found.low[i], found.high[i]) == (box.min(), box.max())


def test_an_index_outside_its_table_is_in_doubt() -> None:
    doubts: list[Tensor] = []
    low = torch.tensor([0, -5, -6, 3, 4])
    high = torch.tensor([4, 4, 0, 5, 4])
    found = Table(torch.arange(5), doubts.append)[ranged(low, high)]
    assert doubts[0].tolist() == [False, False, True, True, False]
    assert found.low.isnan().tolist() == doubts[0].tolist()
    assert isinstance(found, Interval)
