"""Inputs nobody thought of, for what lies between rule, selection and kernel, and lives longer than a call."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

import flexsparse as fs
from flexsparse.kernels.columns import Room
from flexsparse.masks import AttentionSink, Causal, Document, SlidingWindow
from flexsparse.reference import allowed
from flexsparse.selectors import Random

Mod = Callable[..., Tensor]
SQUARE = fs.Grid(40, 40)


def qkv(length: int = 40, grad: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 8, generator=draw).requires_grad_(grad) for _ in range(3)]


def is_exact(rule: Any, grid: fs.Grid = SQUARE, tile: int = 16, **wanted: Any) -> None:
    """No tile is called full or empty that is not."""
    true = allowed(grid, 2, rule=rule, rows=torch.arange(grid.q_len), **wanted)
    layout = fs.build_layout(rule=rule, grid=grid, heads=(2, 2), block_size=tile, **wanted)
    assert torch.equal(layout.dense(), true)
    assert int(layout.logical_pairs) == int(true.sum())


def attends(out: Tensor, tensors: list[Tensor], **options: Any) -> None:
    true = fs.reference(*tensors, **options).out
    torch.testing.assert_close(out.double(), true, atol=1e-4, rtol=1e-4)


def spread(column: int | None) -> fs.Selection:
    """Each of 20 rows of queries its own block, or all of them one block."""
    own = torch.arange(20).view(1, 1, 20, 1)
    indices = own if column is None else torch.full_like(own, column)
    return fs.Selection.from_indices(indices, kv_len=320, q_len=320, kv_block=16, q_block=16)


# What a tile is


@pytest.mark.parametrize(
    ("dtype", "filled", "number"),
    [
        (torch.float16, 1.0, torch.tensor(1.0001)),
        (torch.uint8, 44, torch.tensor(300)),
        (torch.int8, -1, torch.tensor(255)),
    ],
    ids=str,
)
def test_a_filled_tensor_promotes_by_its_rank(
    dtype: torch.dtype, filled: float, number: Tensor
) -> None:
    """Beside a tensor with axes a 0-d one is cast to its type: here they are then equal."""
    is_exact(lambda b, h, q, kv: torch.full_like(kv, filled, dtype=dtype) == number)
    is_exact(lambda b, h, q, kv: torch.full_like(kv, filled, dtype=dtype) != number)


@dataclass(frozen=True, eq=False)
class Above(fs.MaskRule):
    table: Tensor
    limit: float

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.table[kv_idx] >= self.limit


def test_a_threshold_of_a_rule_in_double_is_not_rounded_to_single() -> None:
    """Ties beyond the few positions on which a rule is tried out."""
    table = torch.arange(200, dtype=torch.float64) / 10
    step = torch.tensor(0.1, dtype=torch.float64)
    grid = fs.Grid(200, 200)
    for i in (107, 121, 142, 177, 198):
        limit = float(table[i])
        is_exact(Above(table, limit), grid)
        is_exact(lambda b, h, q, kv, limit=limit: table[kv] <= limit, grid)
        is_exact(lambda b, h, q, kv, limit=limit: kv.to(torch.float64) / 10 < limit, grid)
        far = float(i * step)
        is_exact(lambda b, h, q, kv, far=far: step * q >= far, grid)


BYTES = torch.arange(200).to(torch.uint8)
SMALL = (torch.arange(200) - 100).to(torch.int8)
WIDE = torch.arange(200) + 2**40
ODD = torch.randn(200, generator=torch.Generator().manual_seed(1))
ODD[::17], ODD[5::29], ODD[100] = math.inf, -math.inf, math.nan
EXTREME: dict[str, Mod] = {
    "bytes wrap below": lambda b, h, q, kv: BYTES[kv] - BYTES[q] < 5,
    "bytes wrap above": lambda b, h, q, kv: BYTES[kv] * BYTES[q] > 100,
    "bytes against a larger number": lambda b, h, q, kv: BYTES[kv] < 300,
    "bytes shifted": lambda b, h, q, kv: (BYTES[kv] << 3) > 100,
    "bytes turned": lambda b, h, q, kv: ~BYTES[kv] > 100,
    "int8 against uint8": lambda b, h, q, kv: SMALL[kv] > BYTES[q],
    "int8 difference": lambda b, h, q, kv: SMALL[kv] - SMALL[q] < 0,
    "int8 quotient and remainder": lambda b, h, q, kv: SMALL[kv] // 3 > SMALL[q] % 7,
    "positions as bytes": lambda b, h, q, kv: (q * 3).to(torch.int8) > (kv * 3).to(torch.uint8),
    "past 32 bits": lambda b, h, q, kv: WIDE[kv] >= 2**40 + 50,
    "a remainder past 32 bits": lambda b, h, q, kv: WIDE[kv] % 1000 == WIDE[q] % 1000,
    "a difference past 32 bits": lambda b, h, q, kv: WIDE[kv] - WIDE[q] >= 5,
    "not below": lambda b, h, q, kv: ~(ODD[kv] < ODD[q]),
    "infinities apart": lambda b, h, q, kv: ODD[kv] - ODD[q] > 0,
    "same as itself": lambda b, h, q, kv: ODD[kv] == ODD[kv],
    "times nothing": lambda b, h, q, kv: ODD[kv] * 0 == 0,
    "a root of less than nothing": lambda b, h, q, kv: ODD[kv].sqrt() < 5,
    "clamped": lambda b, h, q, kv: ODD[kv].clamp(-1, 1) <= 1,
    "clamped by a table": lambda b, h, q, kv: ODD[kv].clamp(min=ODD[q]) > 0,
    "as halves": lambda b, h, q, kv: ODD[kv].to(torch.float16) * 1000 < 100,
    "as truth": lambda b, h, q, kv: ODD[kv].to(torch.bool) & torch.logical_not(ODD[q] > 0),
    "sums of truths": lambda b, h, q, kv: (ODD[kv] > 0) + (ODD[q] > 0) & (q >= kv),
    "one by": lambda b, h, q, kv: 1 / ODD[kv] >= 0,
    "nested choice": lambda b, h, q, kv: torch.where(
        q > kv, torch.where(kv % -7 < -3, ODD[kv], ODD[q]), ODD[kv % 3]
    ) > 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", EXTREME)
def test_tables_of_extremes(name: str) -> None:
    is_exact(EXTREME[name], fs.Grid(200, 200))


def test_a_read_past_a_table_is_named_before_a_fallback_too() -> None:
    table = torch.ones(5000, dtype=torch.bool)
    indices = torch.arange(2040, 2060).expand(1, 1, 4096, -1)
    select = fs.Selection.from_indices(indices, kv_len=4096, q_len=4096)
    # No pair of the even sample on which a table is tried out.
    rule = fs.MaskRule.of(lambda b, h, q, kv: table[q + (q == 1001) * (kv == 2049) * 4000])
    options: dict[str, Any] = {"rule": rule, "select": select, "heads": (1, 1)}
    with pytest.raises(fs.FlexSparseError, match="past its end"):
        fs.build_layout(**options, grid=fs.Grid(4096, 4096), fallback="self", block_size=64)


def test_a_rule_too_deep_for_python_is_refused_by_name() -> None:
    rule: fs.MaskRule = Causal()
    for i in range(400):
        rule = rule | SlidingWindow(3) if i % 2 else rule & ~AttentionSink(1)
    with pytest.raises(fs.FlexSparseError, match="deeper than Python can call"):
        fs.attention(*qkv(), rule=rule)
    with pytest.raises(fs.FlexSparseError, match="deeper than Python can call"):
        fs.build_layout(rule=rule, grid=SQUARE, heads=(2, 2))


# What lives longer than a call


def test_a_layout_made_elsewhere_before_a_change_is_refused() -> None:
    ids = torch.arange(40) // 8
    tensors = qkv()
    layout = fs.build_layout(rule=Document(ids), grid=SQUARE, heads=(2, 2), block_size=16)
    assert layout.budget().logical_pairs > 0
    ids.copy_(torch.arange(40) // 20)
    plan = fs.make_plan(*tensors, rule=Document(ids), tile=16, backend="tiles")
    for use in (
        lambda: plan.run(*tensors, layout), lambda: layout.logical_pairs, layout.dense,
        layout.budget, lambda: layout.block_mask,
    ):  # fmt: skip
        with pytest.raises(fs.FlexSparseError, match="has changed since this layout was made"):
            use()
    attends(plan.run(*tensors, plan.layout()).out, tensors, rule=Document(ids))


def test_a_layout_is_not_counted_by_candidates_that_changed() -> None:
    indices = torch.arange(3).view(1, 1, 3, 1)
    blocks = {"q_block": 16, "kv_block": 16}
    select = fs.Selection.from_indices(indices, kv_len=48, q_len=48, **blocks)
    layout = fs.build_layout(select=select, grid=fs.Grid(48, 48), heads=(1, 1), block_size=16)
    assert int(layout.logical_pairs) == 3 * 16 * 16
    select.indices.fill_(0)
    with pytest.raises(fs.FlexSparseError, match="selection has changed"):
        layout.dense()


COPIES: list[Callable[[Any], Any]] = [
    copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)),
]  # fmt: skip


@pytest.mark.parametrize("how", COPIES, ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("changes", [0, 1, 5])
def test_a_copy_of_a_plan_knows_changes_of_its_own_tensors(
    how: Callable[[Any], Any], changes: int
) -> None:
    ids = torch.arange(40) // 9
    for _ in range(changes):
        ids[0] = 0
    tensors = qkv()
    plan = fs.make_plan(*tensors, rule=Document(ids), tile=16, backend="tiles")
    twin = how(plan)
    attends(twin.run(*tensors).out, tensors, rule=Document(ids))
    attends(plan.run(*tensors, how(plan.first)).out, tensors, rule=Document(ids))
    assert isinstance(twin.rule, Document)
    twin.rule.document_of.copy_(torch.arange(40) // 20)
    with pytest.raises(fs.FlexSparseError, match="has changed"):
        twin.run(*tensors)
    attends(twin.run(*tensors, twin.layout()).out, tensors, rule=twin.rule)
    stale = how(twin)
    with pytest.raises(fs.FlexSparseError, match="has changed"):
        stale.run(*tensors)
    attends(stale.run(*tensors, stale.layout()).out, tensors, rule=twin.rule)


def test_a_layout_of_a_table_without_a_count_stays_of_one_time() -> None:
    with torch.inference_mode():
        table = torch.arange(40) < 20
    tensors = qkv()
    rule = fs.MaskRule.of(lambda b, h, q, kv: table[kv])
    plan = fs.make_plan(*tensors, rule=rule, tile=16, backend="tiles")
    layout = plan.layout()
    before = fs.reference(*tensors, rule=rule).out
    with torch.inference_mode():
        table.copy_(torch.arange(40) % 3 == 0)
    held = plan.run(*tensors, layout).out
    torch.testing.assert_close(held.double(), before, atol=1e-4, rtol=1e-4)
    attends(plan.run(*tensors).out, tensors, rule=rule)


def test_a_layout_of_numbers_that_are_none_fits_its_plan() -> None:
    table = torch.randn(40, generator=torch.Generator().manual_seed(0))
    table[3] = math.nan
    tensors = qkv()
    rule = fs.MaskRule.of(lambda b, h, q, kv: table[kv] > 0)
    plan = fs.make_plan(*tensors, rule=rule, tile=16, backend="tiles")
    attends(plan.run(*tensors, pickle.loads(pickle.dumps(plan.first))).out, tensors, rule=rule)


def test_a_layout_from_elsewhere_holds_what_the_plan_promises() -> None:
    q, k, v = qkv()
    v[:, :, 28:] = math.nan
    options: dict[str, Any] = {
        "rule": fs.MaskRule.of(lambda b, h, q, kv: kv < 28), "tile": 16, "backend": "tiles",
    }  # fmt: skip
    layout = fs.make_plan(q, k, v, **options).first
    for promise in ({"sanitize": True}, {"empty": "error"}):
        plan = fs.make_plan(q, k, v, **options, **promise)
        with pytest.raises(fs.FlexSparseError, match="does not belong to this plan"):
            plan.run(q, k, v, layout)
    plan = fs.make_plan(q, k, v, **options, sanitize=True)
    assert plan.run(q, k, v, plan.layout()).out.isfinite().all()


def test_columns_made_late_have_room_for_all_rows() -> None:
    """A layout made without gradients, crowded, in a plan whose columns are narrow."""
    tensors = qkv(320, grad=True)
    with torch.no_grad():
        free = fs.make_plan(*tensors, select=spread(3), tile=16, backend="tiles").first
    plan = fs.make_plan(*tensors, select=spread(None), tile=16, backend="tiles")
    assert free is not None and free.columns is None and plan.terms.columns == Room(4, 4)
    got = torch.autograd.grad(plan.run(*tensors, free).out.square().sum(), tensors)
    loss = fs.reference(*tensors, select=spread(3)).out.square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(loss, tensors), atol=1e-4, rtol=1e-4)


def test_a_block_mask_has_all_rows_of_a_column() -> None:
    plan = fs.make_plan(*qkv(320, grad=True), select=spread(None), tile=16, backend="tiles")
    mask = plan.layout(spread(3)).block_mask
    assert mask.full_q_num_blocks.flatten().tolist() == [0, 0, 0, 20, *[0] * 16]


@pytest.mark.parametrize("selected", [False, True])
def test_a_plan_of_inference_mode_serves_training(selected: bool) -> None:
    tensors = qkv(grad=True)
    blocks = {"kv_block": 8, "q_block": 8, "kv_len": 40, "q_len": 40}
    with torch.inference_mode():
        indices = torch.arange(10).view(1, 1, 5, 2) % 5
        select = fs.Selection.from_indices(indices, **blocks) if selected else None
        plan = fs.make_plan(*tensors, rule=Causal(), select=select, tile=16, backend="tiles")
        layout = plan.layout(select)
    loss = fs.reference(*tensors, rule=Causal(), select=select).out.square().sum()
    true = torch.autograd.grad(loss, tensors)
    for given_layout in (None, layout):
        got = torch.autograd.grad(plan.run(*tensors, given_layout).out.square().sum(), tensors)
        torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen outside"])
def test_a_compiled_layout_is_of_the_last_look_at_a_rule(seen: bool) -> None:
    """The first layout of a plan is not, once a change of the rule has been seen outside."""
    flags = torch.zeros(64, dtype=torch.bool)
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    rule = fs.MaskRule.of(lambda b, h, q, kv: flags[kv])
    plan = fs.make_plan(q, k, v, rule=rule, tile=16, backend="tiles")
    run = torch.compile(lambda: plan.run(q, k, v, plan.layout()).out, backend="eager")
    if seen:
        flags.logical_not_()
        plan.layout()
    with torch.no_grad():
        torch.testing.assert_close(run(), fs.reference(q, k, v, rule=rule).out.float())


def test_a_change_under_a_compiled_plan_is_told_when_asked() -> None:
    """A compiled region cannot look: it keeps the tiles it was compiled with, and whoever asks hears."""
    ids = torch.arange(40) // 20
    tensors = qkv()
    plan = fs.make_plan(*tensors, rule=Document(ids), tile=16, backend="tiles")
    compiled = torch.compile(lambda q, k, v: plan.run(q, k, v).out, backend="eager", fullgraph=True)
    attends(compiled(*tensors), tensors, rule=Document(ids))
    plan.raise_pending()
    ids.copy_(torch.arange(40) // 10)
    compiled(*tensors)
    with pytest.raises(fs.FlexSparseError, match="has changed"):
        plan.raise_pending()
    again = torch.compile(
        lambda q, k, v: fs.attention(q, k, v, rule=rule, backend="tiles"),
        backend="eager", fullgraph=True,
    )  # fmt: skip
    rule = Document(ids)
    attends(again(*tensors), tensors, rule=rule)
    ids.copy_(torch.arange(40) // 4)
    attends(again(*tensors), tensors, rule=rule)


# What a selector may choose from


def test_what_is_within_reach_is_the_callers_own() -> None:
    q, k, _ = qkv()
    selector, rule = Random(block=8, keep=9, q_block=8), Causal()
    with torch.inference_mode():
        first = selector.within_reach(q, k, SQUARE, rule, 2)
    number = int(first.sum())
    again = selector.within_reach(q, k, SQUARE, rule, 2)
    score = torch.ones(again.shape, requires_grad=True)
    torch.where(again, score, 0.0).sum().backward()
    again.fill_(True)
    assert int(selector.within_reach(q, k, SQUARE, rule, 2).sum()) == number


def test_reach_follows_a_table_wherever_it_is_held() -> None:
    table = torch.arange(40) < 8
    q, k, _ = qkv()
    selector = Random(block=8, keep=2, q_block=8)

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor = table) -> Tensor:
        return table[kv]

    assert set(selector.select(q, k, SQUARE, rule).indices.unique().tolist()) == {-1, 0}
    table.copy_((torch.arange(40) >= 16) & (torch.arange(40) < 24))
    assert set(selector.select(q, k, SQUARE, rule).indices.unique().tolist()) == {-1, 2}


# What a rule depends on


@dataclass(slots=True)
class Slotted:
    width: int


WIDTH = [3]


@dataclass
class Computed:
    unused: int = 0

    @property
    def width(self) -> int:
        return WIDTH[0]


def _slotted() -> tuple[Any, Callable[[int], None]]:
    box = Slotted(3)
    return lambda b, h, q, kv: (q - kv).abs() < box.width, lambda n: setattr(box, "width", n)


def _computed() -> tuple[Any, Callable[[int], None]]:
    box = Computed()
    WIDTH[0] = 3
    return lambda b, h, q, kv: (q - kv).abs() < box.width, lambda n: WIDTH.__setitem__(0, n)


def _nested() -> tuple[Any, Callable[[int], None]]:
    boxes = ((Computed(),),)
    WIDTH[0] = 3
    rule = lambda b, h, q, kv: (q - kv).abs() < boxes[0][0].width  # noqa: E731
    return rule, lambda n: WIDTH.__setitem__(0, n)


def _attribute() -> tuple[Any, Callable[[int], None]]:
    def same(x: Tensor) -> Tensor:
        return x

    same.width = 3  # type: ignore[attr-defined]
    rule = lambda b, h, q, kv: same((q - kv).abs()) < same.width  # type: ignore[attr-defined]  # noqa: E731
    return rule, lambda n: setattr(same, "width", n)


def _keyword() -> tuple[Any, Callable[[int], None]]:
    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, width: int = 3) -> Tensor:
        return (q - kv).abs() < width

    return rule, lambda n: rule.__kwdefaults__.__setitem__("width", n)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [_slotted, _computed, _nested, _attribute, _keyword])
def test_a_change_behind_a_closure_is_seen(
    make: Callable[[], tuple[Any, Callable[[int], None]]],
) -> None:
    rule, widen = make()
    tensors = qkv()
    fs.attention(*tensors, rule=rule)
    widen(10)
    attends(fs.attention(*tensors, rule=rule), tensors, rule=rule)


def test_threads_share_a_rule_of_functions() -> None:
    width, first = 3, 5
    inner = lambda x: x < width  # noqa: E731
    rule = fs.MaskRule.of(lambda b, h, q, kv: inner((q - kv).abs()) | (kv < first))
    failed: list[BaseException] = []

    def build() -> None:
        try:
            for _ in range(25):
                is_exact(rule)
        except BaseException as error:
            failed.append(error)

    pause = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=build) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(pause)
    assert not failed


# Anything, in any order


@dataclass(frozen=True)
class Life:
    """A plan, and what happens to it: plain values, so that a failure can be read."""

    seed: int
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    blocks: tuple[int, int] | None
    lists: tuple[int, int]
    keep: int
    tile: tuple[int, int]
    rule: str
    offset: str
    fallback: Any
    sanitize: bool
    pack: Any
    planned_with: bool
    steps: tuple[str, ...]


STEPS = (
    "change rule", "change offset", "next selection", "train", "infer", "copy", "pickle", "elsewhere",
    "roughly", "count", "compile",
)  # fmt: skip


@st.composite
def lives(draw: st.DrawFn) -> Life:
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    batch = draw(st.sampled_from([1, 2]))
    block = st.sampled_from([1, 3, 8, 16, 24, 100])
    return Life(
        seed=draw(st.integers(0, 9999)),
        batch=batch,
        heads=(kv_heads * group, kv_heads),
        lengths=(draw(st.sampled_from([1, 17, 33, 50])), draw(st.sampled_from([1, 16, 31, 65]))),
        blocks=draw(st.sampled_from([None, (draw(block), draw(block))])),
        lists=(
            draw(st.sampled_from([1, batch])),
            draw(st.sampled_from([1, kv_heads, kv_heads * group])),
        ),
        keep=draw(st.sampled_from([0, 1, 4, 70])),
        tile=(draw(st.sampled_from([16, 17, 32])), draw(st.sampled_from([16, 24, 64]))),
        rule=draw(st.sampled_from(sorted(LIVING))),
        offset=draw(st.sampled_from(["none", "some", "each"])),
        fallback=draw(st.sampled_from([None, None, "self", ("local", 5)])),
        sanitize=draw(st.booleans()),
        pack=draw(st.sampled_from([None, "fold", "identity"])),
        planned_with=draw(st.booleans()),
        steps=tuple(draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5))),
    )


LIVING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "flags": lambda ids, flags: fs.MaskRule.of(lambda b, h, q, kv: flags[b, h, kv]),
    "documents": lambda ids, flags: fs.MaskRule.of(lambda b, h, q, kv: ids[b, kv] == ids[b, q % ids.shape[1]]) & Causal(),
    "by head": lambda ids, flags: fs.MaskRule.of(lambda b, h, q, kv: ids[0, kv] >= h),
    "either": lambda ids, flags: SlidingWindow(4) | fs.MaskRule.of(lambda b, h, q, kv: flags[0, 0, kv] & (q >= kv)),
    "not": lambda ids, flags: ~fs.MaskRule.of(lambda b, h, q, kv: (ids[b, kv] - q // 8) % 3 == 0),
}  # fmt: skip


class Living:
    """The plan of a `Life` beside the plain tensors that say what is right."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.draw = torch.Generator().manual_seed(life.seed)
        (q_len, kv_len), batch = life.lengths, life.batch
        self.ids = self.integers(5, batch, kv_len).sort(-1).values
        self.flags = torch.rand(batch, life.heads[0], kv_len, generator=self.draw) < 0.5
        self.offset: Any = {
            "none": None, "some": torch.tensor(kv_len - q_len),
            "each": self.integers(20, batch) + kv_len - q_len - 4,
        }[life.offset]  # fmt: skip
        self.rule = LIVING[life.rule](self.ids, self.flags)
        self.tensors = [
            torch.randn(batch, h, n, 4, generator=self.draw)
            for h, n in ((life.heads[0], q_len), (life.heads[1], kv_len), (life.heads[1], kv_len))
        ]
        self.select = self.selection()
        given = [x.requires_grad_(life.planned_with) for x in self.tensors]
        self.plan = fs.make_plan(*given, **self.options, **self.choices)
        self.layout = self.plan.layout(self.select)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.draw)

    def selection(self) -> fs.Selection | None:
        if self.life.blocks is None:
            return None
        (q_len, kv_len), (q_block, kv_block) = self.life.lengths, self.life.blocks
        shape = (*self.life.lists, -(-q_len // q_block), self.life.keep)
        indices = self.integers(-(-kv_len // kv_block) + 1, *shape) - 1
        indices[torch.rand(shape[:3], generator=self.draw) < 0.3] = -1
        return fs.Selection.from_indices(
            indices, kv_len=kv_len, q_len=q_len, q_block=q_block, kv_block=kv_block
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "rule": self.rule, "select": self.select, "q_offset": self.offset,
            "fallback": self.life.fallback,
        }  # fmt: skip

    @property
    def choices(self) -> dict[str, Any]:
        return {
            "tile": self.life.tile, "sanitize": self.life.sanitize, "pack": self.life.pack,
            "backend": "tiles",
        }  # fmt: skip

    @property
    def grid(self) -> fs.Grid:
        q_len, kv_len = self.life.lengths
        return fs.Grid(q_len, kv_len, q_offset=self.offset, batch=self.life.batch)

    @property
    def seen(self) -> Tensor:
        wanted = {n: x for n, x in self.options.items() if n != "q_offset"}
        rows = torch.arange(self.life.lengths[0])
        return allowed(self.grid, self.life.heads[0], **wanted, rows=rows)

    def take(self, step: str) -> None:
        if step == "change rule":
            self.ids.copy_(self.integers(5, *self.ids.shape).sort(-1).values)
            self.flags.logical_not_()
            self.renew()
        elif step == "change offset" and self.offset is not None:
            self.offset += 3
            self.renew()
        elif step == "next selection":
            self.select = self.selection()
            self.layout = self.plan.layout(self.select)
        elif step in ("train", "infer"):
            for x in self.tensors:
                x.requires_grad_(step == "train")
        elif step == "copy":
            self.layout = copy.deepcopy(self.layout)
        elif step == "pickle":
            self.layout = pickle.loads(pickle.dumps(self.layout)).to("cpu")
        elif step == "elsewhere" and not self.life.sanitize:
            other = fs.make_plan(*self.tensors, **self.options, **self.choices)
            if other.address == self.plan.address:
                self.layout = other.layout(self.select)
        elif step in ("roughly", "count"):
            wanted = {n: x for n, x in self.options.items() if n != "q_offset"}
            made = fs.build_layout(
                **wanted, grid=self.grid, heads=self.life.heads, block_size=self.life.tile,
                exact=step == "count",
            )  # fmt: skip
            self.holds(made)
        elif step == "compile":
            compiled = torch.compile(
                lambda q, k, v: self.plan.run(q, k, v, self.plan.layout(self.select)).out,
                backend="eager", fullgraph=True,
            )  # fmt: skip
            with torch.no_grad():
                self.is_right(compiled(*self.tensors))
            torch._dynamo.reset()

    def renew(self) -> None:
        """After a change: what was made before is refused, and made anew it is right."""
        if not self.layout.versions.current:
            with pytest.raises(fs.FlexSparseError, match="has changed"):
                self.plan.run(*self.tensors, self.layout)
        self.layout = self.plan.layout(self.select)

    def is_right(self, out: Tensor) -> None:
        true = fs.reference(*self.tensors, **self.options).out
        torch.testing.assert_close(out.double(), true, atol=1e-4, rtol=1e-4)

    def holds(self, layout: fs.Layout) -> None:
        seen = self.seen
        assert torch.equal(layout.dense(), seen)
        assert int(layout.logical_pairs) == int(seen.sum())
        self.counts(layout, seen)

    def counts(self, layout: fs.Layout, seen: Tensor) -> None:
        """The budget, tile by tile in logical axes."""
        (q_tile, kv_tile), heads = self.life.tile, self.life.heads
        maps = [
            layout.address.unpack(
                m.expand(
                    layout.address.kernel_batch(self.life.batch),
                    layout.address.kernel_heads[0], -1, -1,
                ),
                self.life.batch,
            )
            for m in layout.tile_maps()
        ]  # fmt: skip
        partial, full = maps
        assert not (partial & full).any()
        budget = layout.budget()
        visited = partial | full
        assert budget.physical_tiles == int(visited.sum())
        assert budget.full_tiles == int(full.sum())
        assert budget.physical_pairs == int(visited.sum()) * q_tile * kv_tile
        assert budget.dense_pairs == seen.numel()
        per = visited.unflatten(1, (heads[1], -1)).any(2)
        bytes_a_tile = kv_tile * 2 * layout.element.head_dim * layout.element.itemsize
        assert budget.kv_bytes_if.per_query_head == int(visited.sum()) * bytes_a_tile
        assert budget.kv_bytes_if.per_kv_head == int(per.sum()) * bytes_a_tile
        assert (budget.rows.min, budget.rows.max) == tuple(
            int(f) for f in torch.aminmax(visited.sum(-1))
        )

    def check(self) -> None:
        wants = self.tensors[0].requires_grad
        out = self.plan.run(*self.tensors, self.layout).out
        self.is_right(out)
        self.holds(self.layout)
        if wants:
            true = fs.reference(*self.tensors, **self.options).out.square().sum()
            got = torch.autograd.grad(out.square().sum(), self.tensors)
            wanted = torch.autograd.grad(true, self.tensors)
            torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


def live(life: Life) -> None:
    try:
        living = Living(life)
    except fs.errors.RuleError as error:
        # A query may stand before the first key, where this table has no entry.
        assert "at index -" in str(error)
        reject()
    living.check()
    for step in life.steps:
        living.take(step)
        living.check()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lives())
def test_a_plan_is_right_all_its_life(life: Life) -> None:
    live(life)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=1500)
@given(lives())
def test_a_plan_is_right_all_its_long_life(life: Life) -> None:
    live(life)
