"""Rules on intervals: never a wrong tile, and pairs asked at the border of a rule alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexsparse as fs
from flexsparse.address import FoldedHeads, Identity
from flexsparse.coverage import Span, cover, every_tile
from flexsparse.intervals import Judge, RuleTiles, Runs, rule_tiles
from flexsparse.masks import AttentionSink, Causal, Document, PrefixLM, RightPadding, SlidingWindow
from flexsparse.occupancy import list_axes
from flexsparse.program import mask_program
from flexsparse.rules import as_rule

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


class Case(NamedTuple):
    """A rule in one call, by plain tensors: the tiles that its pairs give, and what finds them."""

    found: RuleTiles
    partial: Tensor
    full: Tensor
    judged: tuple[Tensor, Tensor]


def case(
    rule: Any,
    grid: fs.Grid,
    tile: tuple[int, int],
    heads: int = 1,
    kv_heads: int | None = None,
    exact: bool = True,
) -> Case:
    fold = kv_heads is not None
    address = FoldedHeads(heads, kv_heads) if kv_heads else Identity(heads, heads)
    program = mask_program(address, grid, as_rule(rule), None, None)
    assert not fold or program.address.kernel_heads[1] == 1
    span, lists = Span(grid.q_len, grid.kv_len, *tile), list_axes(program, grid, None)
    tables = program.tables(grid, CPU)
    tiles = every_tile(*lists, span, CPU)
    covered = cover(program.mod(tables), tiles, span)
    seen = (covered.visible > 0).view(*lists, *span.tiles)
    full = covered.full.view(*lists, *span.tiles) & seen
    verdicts = Judge(program, grid, span, CPU).tiles(tiles)
    return Case(
        rule_tiles(program, tables, grid, span, lists, CPU, exact=exact),
        seen & ~full,
        full,
        (verdicts.full.view(full.shape), verdicts.empty.view(full.shape)),
    )


def as_map(runs: Runs, like: Tensor) -> Tensor:
    found = torch.zeros_like(like).view(-1, like.shape[-1])
    for row, first, stop in zip(*(x.tolist() for x in runs), strict=True):
        assert not found[row, first:stop].any(), "a tile is listed twice"
        found[row, first:stop] = True
    return found.view(like.shape)


def check(rule: Any, grid: fs.Grid, tile: tuple[int, int], **heads: Any) -> None:
    """The tiles of ``rule`` are those of its pairs; what intervals alone say of any tile is true."""
    exact = case(rule, grid, tile, **heads)
    assert torch.equal(as_map(exact.found.full, exact.full), exact.full)
    assert torch.equal(as_map(exact.found.partial, exact.full), exact.partial)
    sure_full, sure_empty = exact.judged
    assert not bool((sure_full & ~exact.full).any())
    assert not bool((sure_empty & (exact.full | exact.partial)).any())
    quick = case(rule, grid, tile, **heads, exact=False).found
    quick_full, quick_partial = (as_map(x, exact.full) for x in (quick.full, quick.partial))
    assert quick.asked == 0
    assert not bool((quick_full & ~exact.full).any())
    assert not bool(((exact.full | exact.partial) & ~(quick_full | quick_partial)).any())
    assert not bool((quick_full & quick_partial).any())


# Rules as the field knows them


def dilated(window: int, step: int) -> Any:
    return lambda b, h, q, kv: (q >= kv) & ((q - kv) % step == 0) & (q - kv < window)


def blocks_apart(size: int) -> Any:
    return lambda b, h, q, kv: q // size == kv // size


def a_shape(window: int, sink: int) -> Any:
    return lambda b, h, q, kv: (q >= kv) & ((q - kv < window) | (kv < sink))


def neighbourhood(width: int, reach: int) -> Any:
    return lambda b, h, q, kv: (
        ((q // width - kv // width).abs() <= reach) & ((q % width - kv % width).abs() <= reach)
    )


def big_bird(length: int, block: int, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, -(-length // block), (-(-length // block), 3), generator=draw)

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        mine, theirs = q // block, kv // block
        near = ((mine - theirs).abs() <= 1) | (kv < block) | (q < block)
        for i in range(3):
            near = near | (chosen[mine, i] == theirs)
        return near

    return rule


def log_sparse(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (((q - kv) & (q - kv - 1)) == 0)


def documents(length: int, mean: int) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return (torch.rand(length, generator=draw) < 1 / mean).cumsum(0)


LENGTH = 700
SCATTERED = documents(LENGTH, 3)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
GALLERY: dict[str, Any] = {
    "none": None,
    "causal": Causal(),
    "streaming": Causal() & (SlidingWindow(130) | AttentionSink(4)),
    "documents": Causal() & Document(documents(LENGTH, 90)),
    "documents, each batch": Document(torch.stack([documents(LENGTH, 40), documents(LENGTH, 300)])),
    "prefix": PrefixLM(torch.tensor([0, 333])),
    "padding": Causal() & RightPadding(torch.tensor([700, 64])),
    "dilated": dilated(256, 4),
    "blocks": blocks_apart(96),
    "A shape": a_shape(200, 5),
    "neighbourhood": neighbourhood(32, 3),
    "BigBird": big_bird(LENGTH, 32),
    "LogSparse": log_sparse,
    "far by head": lambda b, h, q, kv: (q >= kv) & (SLOPES[h] * (q - kv) < 20),
    "by head": lambda b, h, q, kv: (q - kv).abs() <= 40 * (h + 1),
    "by KV position": lambda b, h, q, kv: SCATTERED[kv] % 7 == h,
}


@pytest.mark.parametrize("tile", [(128, 128), (64, 16), (48, 100)], ids=str)
@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery_is_exact(name: str, tile: tuple[int, int]) -> None:
    check(GALLERY[name], fs.Grid(LENGTH, LENGTH, batch=2), tile, heads=4)


# Rules as nobody would write them

# Tables by name: what each axis is read at is drawn, and kept inside by a remainder or a clamp.
TABLES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "ints": ((37,), torch.int64),
    "small": ((5,), torch.int8),
    "bytes": ((9, 4), torch.uint8),
    "grid": ((7, 11), torch.int32),
    "flags": ((50,), torch.bool),
    "chosen": ((6, 9), torch.bool),
    "by_head": ((4,), torch.int32),
    "deep": ((3, 4, 13), torch.int16),
    "reals": ((19,), torch.float32),
    "halves": ((4, 8), torch.bfloat16),
    "doubles": ((4,), torch.float64),
}


def table(name: str, seed: int) -> Tensor:
    shape, dtype = TABLES[name]
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        # Long runs, so that some ranges are of one kind.
        return (torch.rand(shape, generator=draw) < 0.2).cumsum(-1) % 2 == 1
    if dtype.is_floating_point:
        values = torch.randn(shape, generator=draw) * 3
        if seed % 5 == 0:
            values.view(-1)[0], values.view(-1)[-1] = torch.nan, torch.inf
        return values.round(decimals=seed % 3).to(dtype)
    low = 0 if dtype == torch.uint8 else -3
    return torch.randint(low, 9, shape, generator=draw).sort(-1).values.to(dtype)


@st.composite
def tables_read(draw: Any, kind: tuple[torch.dtype, ...], depth: int) -> str:
    name = draw(st.sampled_from([n for n, (_, dtype) in TABLES.items() if dtype in kind]))
    indices = []
    for length in TABLES[name][0]:
        plain = [i for i, n in (("b", 2), ("h", 4)) if n <= length]
        way = draw(st.sampled_from(["%", "clamp", "negative", *plain]))
        if way in plain:
            indices.append(way)
            continue
        inside = draw(whole(depth))
        indices.append(
            f"(({inside}).clamp(0, {length - 1}))" if way == "clamp"
            else f"(({inside}) % {length} - (q > kv) * {length})" if way == "negative"
            else f"(({inside}) % {length})"
        )  # fmt: skip
    return f"{name}[{', '.join(indices)}]"


INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def whole(draw: Any, depth: int) -> str:
    """An integer of the pair, as text, at least int64 wide."""
    if depth == 0:
        return draw(st.sampled_from(["q", "kv", "(q - kv)", "(q + kv)", "q", "kv", "h", "b"]))
    a = draw(whole(depth - 1))
    form = draw(st.integers(0, 15))
    if form < 4:
        b = draw(st.one_of(whole(depth - 1), st.integers(-70, 70).map(str)))
        return f"({a} {draw(st.sampled_from('+-*'))} {b})"
    if form < 8:
        by = draw(st.sampled_from([1, 2, 3, 7, 16, 32, 64, 65, -3, -16, "(h + 1)", "(b - 3)"]))
        return f"({a} {draw(st.sampled_from(['//', '%']))} {by})"
    b = draw(whole(depth - 1))
    if form == 8:
        return f"torch.{draw(st.sampled_from(['minimum', 'maximum']))}({a}, {b})"
    if form == 9:
        return f"torch.where({draw(truth(depth - 1))}, {a}, {b})"
    if form == 10:
        low = draw(st.integers(-40, 100))
        return f"({a}).clamp({low}, {low + draw(st.integers(0, 90))})"
    if form == 11:
        return f"({a}).abs()" if draw(st.booleans()) else f"(-({a}))"
    if form == 12:
        return f"({draw(tables_read(INTS, depth - 1))} + q - q)"
    if form == 13:
        way = draw(st.sampled_from(["fmod({a}, {n})", "div({a}, {n}, rounding_mode='trunc')"]))
        return "torch." + way.format(a=a, n=draw(st.sampled_from([2, 5, 16, -7])))
    if form == 14:
        bits = draw(st.sampled_from([1, 3, 7, 12, 63, -1]))
        return draw(
            st.sampled_from([f"({a} & {bits})", f"({a} >> 2)", f"(~{a})", f"({a} ^ {bits})"])
        )
    wide = draw(st.sampled_from([2**16, 46341, 2**31 - 1, 3 * 10**9]))
    return f"({a} * {wide})"


@st.composite
def real(draw: Any, depth: int) -> str:
    """A float of the pair, as text."""
    a = draw(whole(depth))
    form = draw(st.integers(0, 7))
    if form == 0:
        kind = draw(st.sampled_from(["float32", "float16", "bfloat16", "float64"]))
        return f"({a}).to(torch.{kind})"
    if form == 1:
        return f"({a} / {draw(st.sampled_from([3, 7, 10, 0.1, 'kv', '(h + 1)']))})"
    if form == 2:
        return f"({a} * {draw(st.sampled_from([0.1, 0.25, 1 / 3, -2.5]))})"
    b = draw(tables_read(FLOATS, 0))
    if form == 3:
        return f"({b} * {a})"
    if form == 4:
        return f"({b} + {a} * 0.5)"
    if form == 5:
        return f"torch.where({draw(truth(0))}, {b}, {a} * 0.125)"
    if form == 6:
        return f"(({a}) / 7).{draw(st.sampled_from(['floor', 'ceil', 'trunc', 'abs', 'sqrt']))}()"
    return b


@st.composite
def truth(draw: Any, depth: int) -> str:
    """A bool of the pair, as text."""
    compare = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    if depth == 0:
        b = draw(st.one_of(whole(0), st.integers(-9, 200).map(str)))
        return f"({draw(whole(0))} {draw(compare)} {b})"
    form = draw(st.integers(0, 9))
    if form < 4:
        b = draw(st.one_of(whole(depth - 1), st.integers(-9, 200).map(str)))
        return f"({draw(whole(depth))} {draw(compare)} {b})"
    if form < 6:
        b = draw(st.sampled_from(["0.0", "0.1", "1.0", "7", "12.5", "q", "(q - kv)"]))
        return f"({draw(real(depth - 1))} {draw(compare)} {b})"
    if form == 6:
        return f"(~{draw(truth(depth - 1))})"
    if form == 7:
        return draw(tables_read((torch.bool,), depth - 1))
    sign = draw(st.sampled_from(["&", "|", "^"]))
    return f"({draw(truth(depth - 1))} {sign} {draw(truth(depth - 1))})"


LENGTHS = (1, 7, 63, 64, 65, 200)


@st.composite
def odd_calls(draw: Any) -> dict[str, Any]:
    batch = draw(st.sampled_from([1, 2]))
    offset = draw(st.sampled_from([None, 0, -5, 3, -300, 1000, "each"]))
    if offset == "each":
        offset = torch.tensor(draw(st.lists(st.integers(-70, 200), min_size=batch, max_size=batch)))
    return {
        "rule": draw(truth(draw(st.integers(1, 3)))),
        "seed": draw(st.integers(0, 999)),
        "grid": fs.Grid(
            draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS)),
            q_offset=offset, batch=batch,
        ),
        "tile": (draw(st.sampled_from([16, 17, 64, 128])), draw(st.sampled_from([16, 48, 128]))),
        "kv_heads": draw(st.sampled_from([None, 1, 2])),
    }  # fmt: skip


def try_out(call: dict[str, Any]) -> None:
    names = {name: table(name, call["seed"]) for name in TABLES}
    rule = eval(f"lambda b, h, q, kv: {call['rule']}", {"torch": torch, **names})
    check(rule, call["grid"], call["tile"], heads=4, kv_heads=call["kv_heads"])


@settings(max_examples=150, **SETTINGS)
@given(odd_calls())
def test_no_tile_is_ever_wrong(call: dict[str, Any]) -> None:
    try_out(call)


@pytest.mark.slow
@settings(max_examples=4000, **SETTINGS)
@given(odd_calls())
def test_no_tile_is_ever_wrong_at_length(call: dict[str, Any]) -> None:
    try_out(call)
