"""Rules on intervals: never a wrong tile, and pairs asked at the border of a rule alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

import flexsparse as fs
from flexsparse.address import FoldedHeads, Identity
from flexsparse.coverage import Span, cover, every_tile
from flexsparse.intervals import Judge, RuleTiles, Runs, lists_of, refine, rule_tiles
from flexsparse.kernels.compress import compress
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
    address = FoldedHeads(heads, kv_heads) if kv_heads else Identity(heads, heads)
    program = mask_program(address, grid, as_rule(rule), None, None)
    span, lists = Span(grid.q_len, grid.kv_len, *tile), list_axes(program, grid, None)
    tables = program.tables(program.fixed_tables(grid, CPU))
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
    try:
        check(rule, call["grid"], call["tile"], heads=4, kv_heads=call["kv_heads"])
    except fs.errors.RuleError as error:
        # A single key cannot excuse an index below zero.
        assert "at index -" in str(error)
        reject()


WHOLE = (
    "q & 12", "q & 7", "(q + kv) & 5", "q | 3", "q ^ 5", "~q", "q << 2", "q >> 1", "q % 5", "q // 3",
    "-q", "(q - kv).abs()", "torch.minimum(q, kv)", "torch.maximum(q, kv)", "q.clamp(3, 40)",
    "torch.where(q > kv, 1, 2)", "torch.where(q > kv, q, 2)", "q * kv", "(q > kv) & (kv > 3)", "q == kv",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64", "int64", "bool"])
@pytest.mark.parametrize("number", WHOLE)
def test_whole_numbers_in_other_types(number: str, kind: str) -> None:
    """Bounds are fp64 whatever they came from: a conversion reads their bits."""
    compared = "" if kind == "bool" else " < 7"
    rule = eval(f"lambda b, h, q, kv: ({number}).to(torch.{kind}){compared}", {"torch": torch})
    for lengths in ((1, 1), (1, 63), (65, 65)):
        check(rule, fs.Grid(*lengths), (16, 16))


@settings(max_examples=150, **SETTINGS)
@given(odd_calls())
def test_no_tile_is_ever_wrong(call: dict[str, Any]) -> None:
    try_out(call)


@pytest.mark.slow
@settings(max_examples=4000, **SETTINGS)
@given(odd_calls())
def test_no_tile_is_ever_wrong_at_length(call: dict[str, Any]) -> None:
    try_out(call)


@st.composite
def near_thresholds(draw: Any) -> tuple[Tensor, Tensor]:
    """Slopes, and limits at, just under or just over a product of one of them with a distance."""
    slopes = torch.tensor(
        draw(st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=4)), dtype=torch.float32
    )
    distance = draw(st.integers(-199, 199))
    limit = slopes[draw(st.integers(0, 3))] * distance
    for _ in range(draw(st.integers(0, 3))):
        limit = torch.nextafter(limit, torch.tensor(draw(st.sampled_from([-9e9, 9e9]))))
    return slopes, limit


@settings(max_examples=100, **SETTINGS)
@given(near_thresholds(), st.sampled_from(["a", "b", "c", "d", "e"]))
def test_a_threshold_that_scores_just_meet(given: tuple[Tensor, Tensor], form: str) -> None:
    slopes, limit = given
    third = limit.item()
    rule = {
        "a": lambda b, h, q, kv: slopes[h] * (q - kv) > limit,
        "b": lambda b, h, q, kv: (slopes[h] * q - slopes[h] * kv) <= third,
        "c": lambda b, h, q, kv: (q - kv) / 7 * slopes[h] >= limit / 7,
        "d": lambda b, h, q, kv: slopes[h].to(torch.bfloat16) * (q - kv) < limit,
        "e": lambda b, h, q, kv: (q - kv).to(torch.float16) * slopes[h].to(torch.float16) == limit,
    }[form]
    check(rule, fs.Grid(200, 200), (16, 16), heads=4)


def test_a_float_is_known_no_better_than_kernels_agree_on_it() -> None:
    """fp32 rounds 0.1 * 3 up and a fused product does not: neither tile may be decided unasked."""
    tenth = torch.tensor([0.1])
    limit = torch.tensor([0.3])
    rule = lambda b, h, q, kv: tenth[h] * (q - kv) - limit[h] >= 0  # noqa: E731
    sure_full, sure_empty = case(rule, fs.Grid(1, 1, q_offset=3), (16, 16)).judged
    assert not sure_full.any()
    assert not sure_empty.any()


# Lists


@pytest.mark.parametrize("whole", [2**22, 0], ids=["as wide as the grid", "as wide as needed"])
@pytest.mark.parametrize("part", [0.0, 2.0], ids=["by map", "by sorting"])
@pytest.mark.parametrize("name", ["causal", "BigBird", "far by head", "documents, each batch"])
def test_lists_are_those_of_the_map(
    name: str, part: float, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexsparse.intervals.worklists.WHOLE", whole)
    monkeypatch.setattr("flexsparse.intervals.worklists._DENSE", part)
    monkeypatch.setattr("flexsparse.intervals.worklists._AT_ONCE", {"cpu": 50})
    given = case(GALLERY[name], fs.Grid(LENGTH, LENGTH, batch=2), (48, 16), heads=4)
    lists = lists_of(given.found)
    maps = [given.partial, given.full]
    maps += [m.transpose(-1, -2) for m in maps]
    widest_row = max(1, int(lists[0].max()), int(lists[2].max()))
    for present, counts, indices in zip(maps, lists[::2], lists[1::2], strict=True):
        wanted_counts, wanted = compress(present)
        width = indices.shape[-1]
        longest = max(1, int(counts.max()))
        # By row both kinds are as wide.
        widest = longest if any(present is m for m in maps[2:]) else widest_row
        assert longest <= width <= (wanted.shape[-1] if whole else 2 * widest)
        assert torch.equal(counts, wanted_counts)
        assert torch.equal(indices, wanted[..., :width])
        assert counts.dtype == indices.dtype == torch.int32
    assert lists[1].is_contiguous() and lists[3].is_contiguous()
    assert lists[1].stride() == lists[3].stride() and lists[5].stride() == lists[7].stride()


@pytest.mark.parametrize("name", [n for n in GALLERY if n != "none"])
def test_tiles_are_those_of_torch(name: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    length = 512
    layout = fs.build_layout(
        rule=GALLERY[name], grid=fs.Grid(length, length, batch=2), heads=(4, 4), block_size=64
    )
    theirs = create_block_mask(GALLERY[name], 2, 4, length, length, "cpu", BLOCK_SIZE=64)
    ours = layout.block_mask
    for field in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        mine, wanted = getattr(ours, field), getattr(theirs, field)
        assert torch.equal(mine.expand_as(wanted), wanted), field
    assert torch.equal(ours.to_dense().expand(2, 4, -1, -1), theirs.to_dense())


@pytest.mark.parametrize("name", GALLERY)
def test_counts_and_who_sees_are_those_of_the_pairs(name: str) -> None:
    grid = fs.Grid(LENGTH, LENGTH, batch=2)
    rule = GALLERY[name]
    layout = fs.build_layout(rule=rule, grid=grid, heads=(4, 2), block_size=96, sanitize=True)
    dense = layout.dense()
    assert int(layout.logical_pairs) == int(dense.sum())
    assert layout.seen_keys is not None
    seen = dense.unflatten(1, (2, 2)).any(3).any(2)
    assert torch.equal(layout.seen_keys.expand_as(seen), seen)
    if bool(dense.any(-1).all()):
        fs.build_layout(rule=rule, grid=grid, heads=(4, 2), block_size=96, empty="error")
    else:
        with pytest.raises(fs.FlexSparseError, match="sees no key"):
            fs.build_layout(rule=rule, grid=grid, heads=(4, 2), block_size=96, empty="error")


# Errors


def test_a_read_past_a_table_at_one_pair_is_an_error() -> None:
    """Where tiles are decided whole, no pair is asked: that the table holds must be sure first."""
    table = torch.ones(5000, dtype=torch.bool)

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q + (q == 1001) * (kv == 2049) * 4000]

    with pytest.raises(fs.FlexSparseError, match="reads a table past its end"):
        fs.build_layout(rule=rule, grid=fs.Grid(4096, 4096), heads=(1, 1))


def test_a_division_by_zero_at_one_pair_is_an_error() -> None:
    rule = lambda b, h, q, kv: (q // (q + kv - 3000) > 9000) & (q == 1000)  # noqa: E731
    with pytest.raises(fs.FlexSparseError, match="divides by zero"):
        fs.build_layout(rule=rule, grid=fs.Grid(2048, 2048), heads=(1, 1))


# Cost


def pairs_asked(rule: Any, length: int, tile: int) -> tuple[int, int]:
    """Tiles left to their pairs, and pairs asked of the mask."""
    grid = fs.Grid(length, length)
    program = mask_program(Identity(1, 1), grid, as_rule(rule), None, None)
    asked = 0
    mod: Callable[..., Callable[..., Tensor]] = type(program).mod

    def counting(self: Any, tables: list[Tensor]) -> Callable[..., Tensor]:
        inner = mod(self, tables)

        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            nonlocal asked
            asked += torch.broadcast_tensors(b, h, q, kv)[0].numel()
            return inner(b, h, q, kv)

        return mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(program), "mod", counting)
        span = Span(length, length, tile, tile)
        found = rule_tiles(
            program, program.tables(program.fixed_tables(grid, CPU)), grid, span, (1, 1), CPU
        )
    return found.asked, asked


REGULAR: dict[str, Callable[[int], Any]] = {
    "causal": lambda n: Causal(),
    "streaming": lambda n: Causal() & (SlidingWindow(1000) | AttentionSink(4)),
    "documents": lambda n: Causal() & Document(torch.arange(n) // 900),
    "prefix": lambda n: PrefixLM(n // 3),
    "dilated": lambda n: dilated(512, 4),
    "blocks": lambda n: blocks_apart(500),
    "A shape": lambda n: a_shape(1000, 70),
    "neighbourhood": lambda n: neighbourhood(256, 3),
    "BigBird": lambda n: big_bird(n, 64),
}


@pytest.mark.parametrize("name", REGULAR)
def test_pairs_are_asked_along_the_border_only(name: str) -> None:
    lengths = (2**13, 2**14, 2**15)
    tiles, pairs = zip(*(pairs_asked(REGULAR[name](n), n, 64) for n in lengths), strict=True)
    for smaller, larger in pairwise(tiles):
        assert larger <= 2.3 * smaller
    for smaller, larger in pairwise(pairs):
        assert larger <= 2.3 * smaller + 64 * 64 * 8
    assert pairs[-1] < lengths[-1] ** 2 / 200


def test_a_million_tokens() -> None:
    length, tile, window = 2**20, 128, 4096
    layout = fs.build_layout(
        rule=Causal() & (SlidingWindow(window) | AttentionSink(4)),
        grid=fs.Grid(length, length),
        heads=(32, 8),
        block_size=tile,
    )
    rows = length // tile
    row = torch.arange(rows)
    full = row.clamp(max=window // tile - 1)
    assert torch.equal(layout.full_kv_num_blocks[0, 0], full.to(torch.int32))
    # The diagonal, the far end of the window, and the sink where the window does not hold it.
    edge = (row >= window // tile).int() + (row > window // tile).int()
    assert torch.equal(layout.kv_num_blocks[0, 0], (1 + edge).to(torch.int32))
    assert sum(x.numel() for x in layout.lists) < 100 * rows + 2 * rows * rows
    # As the full ones need: both kinds have the same strides.
    assert layout.kv_indices.shape[-1] == layout.full_kv_indices.shape[-1] == window // tile


@pytest.mark.gpu
@pytest.mark.parametrize("name", GALLERY)
def test_a_gpu_finds_the_same_tiles(name: str, device: torch.device) -> None:
    grid = fs.Grid(LENGTH, LENGTH, batch=2)
    there, here = (
        fs.build_layout(rule=GALLERY[name], grid=grid, heads=(4, 4), block_size=64, device=d)
        for d in (device, CPU)
    )
    for mine, wanted in zip(there.lists, here.lists, strict=True):
        assert torch.equal(mine.cpu(), wanted)
    assert int(there.logical_pairs) == int(here.logical_pairs)


@pytest.mark.parametrize("some", [1, 3, 4096])
@pytest.mark.parametrize("name", [n for n in GALLERY if n != "none"])
def test_slices_of_queries_change_no_tile(
    name: str, some: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are asked, of which stretches it is tried, and whether that tells."""

    def tiles() -> tuple[Tensor, Tensor]:
        grid = fs.Grid(LENGTH, LENGTH, batch=2)
        made = fs.build_layout(rule=GALLERY[name], grid=grid, heads=(4, 4), block_size=(48, 16))
        return made.tile_maps()

    wanted = tiles()
    monkeypatch.setattr(refine, "_MANY", 0)
    monkeypatch.setattr(refine, "_SOME", some)
    assert all(torch.equal(a, b) for a, b in zip(tiles(), wanted, strict=True))
