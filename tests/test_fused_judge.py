"""A judge as one kernel: it says what the judge run line by line says, and is compiled once a kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from test_gallery_fused import RULES
from test_intervals import GALLERY, LENGTH, SETTINGS, TABLES, odd_calls, table
from torch import Tensor

import flexsparse as fs
from flexsparse.address import FoldedHeads, Identity
from flexsparse.coverage import Span, cover, every_tile
from flexsparse.device import Raised, compiles
from flexsparse.intervals import Judge, finding, fused, lists_of, rule_codes, rule_lists, rule_tiles
from flexsparse.intervals.painting import painted
from flexsparse.kernels.rows import EMPTY, FULL, PARTIAL
from flexsparse.kernels.tile_lists import by_map, tile_lists
from flexsparse.masks import Causal, PrefixLM
from flexsparse.measure.workloads import head_windows
from flexsparse.occupancy import list_axes
from flexsparse.program import MaskProgram, mask_program
from flexsparse.rules import as_rule

CPU = torch.device("cpu")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges are fused here, from the first build on, and none is known yet."""
    monkeypatch.setattr(fused, "FUSED_ON", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(fused, "BUILDS_BEFORE", 0)
    for name in ("_built", "_reads", "_kernels"):
        monkeypatch.setattr(fused, name, type(getattr(fused, name))())


@pytest.fixture
def traced(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced runs as it is: to compile it takes longer than any test may."""
    monkeypatch.setattr(fused, "as_kernel", lambda graph: graph)


def call_of(
    rule: Any, grid: fs.Grid, tile: tuple[int, int], heads: int, kv_heads: int | None = None
) -> tuple[MaskProgram, Span, tuple[int, int]]:
    address = FoldedHeads(heads, kv_heads) if kv_heads else Identity(heads, heads)
    program = mask_program(address, grid, as_rule(rule), None, None)
    return program, Span(grid.q_len, grid.kv_len, *tile), list_axes(program, grid, None)


def check(
    rule: Any, grid: fs.Grid, tile: tuple[int, int], device: torch.device = CPU, **heads: Any
) -> Tensor | None:
    """The verdicts are those line by line, and what corners settle is so; gives all the codes."""
    program, span, lists = call_of(rule, grid, tile, **heads)
    tables = program.tables(program.fixed_tables(grid, device))
    judge = fused.fused_judge(program, tables, span, lists, device)
    if judge is None:
        return None
    codes = judge.every().flatten()
    tiles = every_tile(*lists, span, device)
    verdicts = Judge(program, grid, span, device).tiles(tiles)
    assert torch.equal(codes == FULL, verdicts.full)
    assert torch.equal(codes == EMPTY, verdicts.empty)
    assert torch.equal(codes == fused.MAY_FAIL, verdicts.may_fail)
    partial = tiles[codes == PARTIAL]
    covered = cover(program.mod(tables), partial, span)
    assert bool(((covered.visible > 0) & ~covered.full).all())
    return codes


# The same verdicts


@pytest.mark.parametrize("name", [n for n in GALLERY if n != "none"])
def test_verdicts_are_those_line_by_line(name: str, traced: None) -> None:
    codes = check(GALLERY[name], fs.Grid(LENGTH, LENGTH, batch=2), (48, 100), heads=4)
    assert codes is not None
    settled = (codes < fused.OPEN).double().mean()
    assert settled > 0.5 or name in ("LogSparse", "by KV position")


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_verdicts_of_the_gallery_are_those_line_by_line(name: str, traced: None) -> None:
    assert check(RULES[name], fs.Grid(200, 200), (16, 32), heads=4) is not None


def random_rule(call: dict[str, Any]) -> Any:
    names = {name: table(name, call["seed"]) for name in TABLES}
    return eval(f"lambda b, h, q, kv: {call['rule']}", {"torch": torch, **names})


def try_out(call: dict[str, Any], device: torch.device = CPU) -> None:
    """The verdicts of a random rule, and where it is here both ways to its lists."""
    grid, tile, heads = call["grid"], call["tile"], {"heads": 4, "kv_heads": call["kv_heads"]}
    rule = random_rule(call)
    try:
        if check(rule, grid, tile, device, **heads) is None:
            reject()
    except fs.errors.RuleError as error:
        assert "at index -" in str(error)
        reject()
    program, span, lists = call_of(rule, grid, tile, **heads)
    tables = program.tables(program.fixed_tables(grid, device))
    found: list[Any] = []
    for mapped in (None, 0, 2**24):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "FUSED_ON", frozenset() if mapped is None else fused.FUSED_ON)
            patch.setattr("flexsparse.intervals.worklists.MAPPED", mapped)
            try:
                found.append(rule_lists(program, tables, grid, span, lists, device))
            except (IndexError, RuntimeError) as error:
                if device.type != "cpu":
                    raise
                found.append(str(error)[:40])
    wanted, *others = found
    for ours in others:
        if isinstance(wanted, str) or isinstance(ours, str):
            assert ours == wanted
        else:
            assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@settings(max_examples=15, **SETTINGS)
@given(odd_calls())
def test_odd_rules_give_what_they_give_line_by_line(traced: None, call: dict[str, Any]) -> None:
    try_out(call)


@pytest.mark.parametrize("at_once", [1, 7, 10**6])
def test_a_map_is_judged_in_parts(
    at_once: int, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of which goes on where the one before it ended; one tile is a part too."""
    monkeypatch.setattr(fused, "TILES_AT_ONCE", at_once)
    codes = check(GALLERY["by head"], fs.Grid(200, 200), (64, 48), heads=4)
    assert codes is not None and len(codes.unique()) > 1


@pytest.mark.slow
@settings(max_examples=600, **SETTINGS)
@given(odd_calls())
def test_many_odd_rules_give_what_they_give_line_by_line(
    traced: None, call: dict[str, Any]
) -> None:
    try_out(call)


def test_one_kernel_for_all_numbers(anew: None) -> None:
    """Other windows, lengths, tiles and heads are other arguments of what was compiled."""
    before = len(compiles.kinds)
    calls = ((4, 64, 512, 2048, 128), (4, 16, 99, 1000, 48), (8, 20, 300, 4096, 64))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for heads, smallest, largest, length, tile in calls:
        rule = head_windows(heads, smallest, largest)
        codes = check(rule, fs.Grid(length, length), (tile, tile), heads=heads)
        assert codes is not None
        # Corners settle every tile that such a rule cuts.
        assert int(codes.max()) < fused.OPEN
    assert len(compiles.kinds[before:]) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


# Whole builds


def lists_both_ways(
    rule: Any, grid: fs.Grid, tile: tuple[int, int], heads: int
) -> tuple[list[Tensor], list[Tensor]]:
    program, span, lists = call_of(rule, grid, tile, heads)
    tables = program.tables(program.fixed_tables(grid, CPU))
    ours = rule_lists(program, tables, grid, span, lists, CPU)
    return ours, lists_of(rule_tiles(program, tables, grid, span, lists, CPU))


@pytest.mark.parametrize("mapped", [2**24, 0], ids=["as a map", "coarse to fine"])
@pytest.mark.parametrize(
    "name", ["streaming", "dilated", "BigBird", "LogSparse", "far by head", "documents, each batch"]
)
def test_lists_are_those_without(
    name: str, mapped: int, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("finding", "worklists", "codes"):
        monkeypatch.setattr(f"flexsparse.intervals.{module}.MAPPED", mapped, raising=False)
    monkeypatch.setattr(finding, "_CUT", 4)
    monkeypatch.setattr(finding, "_MANY", 2)
    grid = fs.Grid(LENGTH, LENGTH, batch=2)
    ours, wanted = lists_both_ways(GALLERY[name], grid, (48, 16), 4)
    assert len(ours) == len(wanted) == 8
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous() and mine.dtype == torch.int32
    program, span, lists = call_of(GALLERY[name], grid, (48, 16), 4)
    fixed = program.fixed_tables(grid, CPU)
    tiles = rule_tiles(program, program.tables(fixed), grid, span, lists, CPU)
    codes = rule_codes(program, fixed, grid, span, CPU)
    assert torch.equal(codes.expand_as(painted(tiles)), painted(tiles))


def test_a_rule_is_fused_when_it_is_built_again(
    traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "BUILDS_BEFORE", 1)
    grid = fs.Grid(256, 256)
    made = [
        fused.fused_judge(*_given(rule, grid), CPU) is not None
        for rule in (PrefixLM(torch.tensor([9])), Causal(), PrefixLM(torch.tensor([70])), Causal())
    ]
    assert made == [False, False, True, True]


def _given(rule: Any, grid: fs.Grid) -> tuple[MaskProgram, list[Tensor], Span, tuple[int, int]]:
    program, span, lists = call_of(rule, grid, (64, 64), 1)
    return program, program.tables(program.fixed_tables(grid, CPU)), span, lists


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_type_that_kernels_compute_in_another_is_never_fused(
    dtype: torch.dtype, traced: None
) -> None:
    limit = torch.tensor([3.0], dtype=dtype)
    for rule in (
        lambda b, h, q, kv: (q - kv).to(dtype) < 3,
        lambda b, h, q, kv: limit[h] > q - kv,
        lambda b, h, q, kv: limit[0] > q - kv,
    ):
        assert fused.fused_judge(*_given(rule, fs.Grid(64, 64)), CPU) is None


def test_no_corner_is_believed_where_floats_decide(traced: None) -> None:
    """A kernel may round what the host does not: which pair such a rule lets through is the host's."""
    slopes = torch.tensor([0.1])
    rule = lambda b, h, q, kv: slopes[h] * (q - kv) < 20  # noqa: E731
    codes = check(rule, fs.Grid(512, 512), (64, 64), heads=1)
    assert codes is not None and PARTIAL not in codes and fused.OPEN in codes


def test_errors_at_one_pair_still_show(traced: None) -> None:
    table = torch.ones(5000, dtype=torch.bool)
    past = lambda b, h, q, kv: table[q + (q == 1001) * (kv == 2049) * 4000]  # noqa: E731
    zero = lambda b, h, q, kv: (q // (q + kv - 3000) > 9000) & (q == 1000)  # noqa: E731
    for rule, message in ((past, "past its end"), (zero, "divides by zero")):
        with pytest.raises(fs.FlexSparseError, match=message):
            fs.build_layout(rule=rule, grid=fs.Grid(4096, 4096), heads=(1, 1))


# On a device


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in GALLERY if n != "none"])
def test_a_compiled_judge_says_the_same(name: str, anew: None, device: torch.device) -> None:
    codes = check(GALLERY[name], fs.Grid(LENGTH, LENGTH, batch=2), (64, 64), device, heads=4)
    assert (codes is None) is (name == "none")


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_a_compiled_judge_of_the_gallery_says_the_same(
    name: str, anew: None, device: torch.device
) -> None:
    assert check(RULES[name], fs.Grid(200, 200), (16, 32), device, heads=4) is not None


@pytest.mark.gpu
@pytest.mark.slow
@settings(max_examples=40, **SETTINGS)
@given(odd_calls())
def test_compiled_judges_of_odd_rules_say_the_same(
    anew: None, device: torch.device, call: dict[str, Any]
) -> None:
    try_out(call, device)


@pytest.mark.gpu
@pytest.mark.parametrize("mapped", [2**24, 0], ids=["as a map", "coarse to fine"])
@pytest.mark.parametrize("name", ["streaming", "BigBird", "by head", "documents, each batch"])
def test_a_device_finds_the_lists_of_the_host(
    name: str, mapped: int, anew: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("worklists", "codes"):
        monkeypatch.setattr(f"flexsparse.intervals.{module}.MAPPED", mapped)
    grid = fs.Grid(LENGTH, LENGTH, batch=2)
    there = fs.build_layout(
        rule=GALLERY[name], grid=grid, heads=(4, 4), block_size=64, device=device
    )
    monkeypatch.setattr(fused, "FUSED_ON", frozenset())
    here = fs.build_layout(rule=GALLERY[name], grid=grid, heads=(4, 4), block_size=64, device=CPU)
    for mine, wanted in zip(there.lists, here.lists, strict=True):
        assert torch.equal(mine.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 33, 257, 3000])
def test_lists_by_the_kernel(columns: int, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 3, (2, 3, 40, columns), generator=draw, dtype=torch.int8)
    for there, here in ((codes.to(device), codes.clone()), (codes.to(device).mT, codes.mT)):
        rows, columns = here.shape[2:]
        across = columns, max(1, columns // 5)
        for down in (None, (max(1, rows // 5), rows)):
            made, wanted = tile_lists(there, across, down), by_map(here, across, down)
            assert len(made) == len(wanted) == (4 if down is None else 8)
            for mine, theirs in zip(made, wanted, strict=True):
                assert torch.equal(mine.cpu(), theirs)
            for code in (None, 3, 4):
                for at, where in ((here, torch.device("cpu")), (there, device)):
                    if code is not None:
                        at[-1, -1, -1, -1] = code
                    flag = Raised(where)
                    told = tile_lists(at, across, down, flag.flag)
                    assert flag.heard() is (code is not None)
                    if code is None:
                        assert all(map(torch.equal, told, tile_lists(at, across, down)))
            here[-1, -1, -1, -1] = there[-1, -1, -1, -1] = 0
