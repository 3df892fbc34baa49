"""What a Selection was given becomes sets when somebody asks, and never other sets than those."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flexsparse as fs
from flexsparse.given import Given
from flexsparse.kernels import dedupe, rows, words
from flexsparse.kernels.as_given import given_tiles
from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.kernels.tile_lists import tile_lists
from flexsparse.masks import Causal
from tests.test_graphs import captured

CHANGED = (
    "have changed in place since from_indices.* make the Selection anew, or read select.indices"
)


def raw() -> Tensor:
    return torch.tensor([[[[3, 1, 3, -1]], [[0, 0, 2, 1]]]])


SETS = [[[[1, 3, -1, -1]], [[0, 1, 2, -1]]]]


def chosen(indices: Tensor) -> fs.Selection:
    return fs.Selection.from_indices(indices, kv_len=4, q_len=1)


@pytest.fixture(autouse=True)
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, so that this is told here too."""
    monkeypatch.setattr(Given, "spares", staticmethod(lambda tensor: not tensor.is_meta))


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often sets were made."""
    made: list[int] = []

    def counted(*args: Any) -> Tensor:
        made.append(1)
        return dedupe.sorted_unique(*args)

    for module in ("given", "selection"):
        monkeypatch.setattr(f"flexsparse.{module}.sorted_unique", counted)
    return made


def test_sets_are_made_once_and_only_for_who_asks(sorts: list[int]) -> None:
    select = chosen(raw())
    assert (select.batch, select.heads, select.rows) == (1, 2, 1)
    assert select.shape == (1, 2, 1, 4) and select.device.type == "cpu"
    assert select.candidates == 4
    assert not sorts and select.given is not None
    assert select.indices.tolist() == SETS and select.indices.dtype == torch.int32
    assert select.indices is select.indices and len(sorts) == 1 and select.given is None


def test_a_wide_list_is_as_wide_as_there_are_candidates() -> None:
    many = torch.zeros(1, 1, 1, 9, dtype=torch.int64)
    select = chosen(many)
    assert select.shape == (1, 1, 1, 4) == select.indices.shape
    none = chosen(many[..., :0])
    assert none.shape == (1, 1, 1, 1) and none.indices.tolist() == [[[[-1]]]]


USES: dict[str, Callable[[fs.Selection], Any]] = {
    "indices": lambda s: s.indices,
    "given": lambda s: s.given,
    "counts": lambda s: s.counts,
    "blocks": lambda s: s.blocks(),
    "refine": lambda s: s.refine(q_block=1, kv_block=1),
    "to": lambda s: s.to("cpu"),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "tree": torch.utils._pytree.tree_leaves,
    "attention": lambda s: fs.attention(
        *(torch.zeros(1, 2, n, 8) for n in (1, 4, 4)), select=s, backend="tiles"
    ),
    "reference": lambda s: fs.reference(*(torch.zeros(1, 2, n, 8) for n in (1, 4, 4)), select=s),
    "compiled": torch.compile(lambda s: s.indices + 1, fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_change_before_there_are_sets_is_an_error(use: Callable[[fs.Selection], Any]) -> None:
    indices = raw()
    select = chosen(indices)
    use(chosen(indices))
    indices[0, 0, 0, 0] = 2
    # Dynamo of torch 2.11 hands the words on, but not the error.
    handed_on = torch._dynamo.exc.InternalTorchDynamoError
    with pytest.raises((fs.FlexSparseError, handed_on), match=CHANGED):
        use(select)
    assert "[1, 2, 1, 4] of 4 candidates" in repr(select)


def test_a_change_afterwards_is_none_of_the_sets() -> None:
    indices = raw()
    select = chosen(indices)
    kept = select.indices
    indices.fill_(-1)
    assert select.indices is kept and kept.tolist() == SETS
    kept.fill_(2)
    assert ", 4 a row" in repr(select)


def test_what_was_given_is_let_go_once_there_are_sets() -> None:
    indices = raw()
    select = chosen(indices)
    plan_made_of = select.held
    alive = weakref.ref(indices)
    del indices
    gc.collect()
    assert alive() is not None
    assert select.indices.tolist() == SETS
    gc.collect()
    assert alive() is None and plan_made_of is select.held


@pytest.mark.parametrize("asked", [False, True])
def test_copies_hold_the_sets(asked: bool) -> None:
    for how in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        select = chosen(raw())
        if asked:
            assert select.indices.tolist() == SETS
        other = how(select)
        assert other.indices.tolist() == SETS
        assert (other.shape, other.candidates) == (select.shape, 4)
        other.indices.fill_(0)
        assert how is copy.copy or select.indices.tolist() == SETS


def test_a_plan_is_pickled_with_what_its_selection_was_given() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 4, 4))
    plan = fs.make_plan(q, k, v, select=chosen(raw()), backend="tiles")
    other = pickle.loads(pickle.dumps(plan))
    assert torch.equal(other.run(q, k, v).out, plan.run(q, k, v).out)
    other.first.select.indices.fill_(0)
    with pytest.raises(fs.FlexSparseError, match="has changed since this layout"):
        other.run(q, k, v)
    plan.run(q, k, v)


def test_without_a_count_of_changes_sets_are_made_at_once(sorts: list[int]) -> None:
    with torch.inference_mode():
        indices = raw()
        select = chosen(indices)
        assert len(sorts) == 1 and select.given is None
        indices.fill_(-1)
        assert select.indices.tolist() == SETS
        later = chosen(raw().clone())
        assert len(sorts) == 2 and later.given is None


def test_sets_made_in_inference_mode_take_part_in_gradients() -> None:
    select = chosen(raw())
    with torch.inference_mode():
        assert select.indices.tolist() == SETS
    assert not select.indices.is_inference()


def test_transforms_see_sets() -> None:
    def best(x: Tensor) -> Tensor:
        select = fs.Selection.from_indices(
            x[None, None, None], kv_len=4, q_len=1, out_of_range="drop"
        )
        assert select.given is None
        return select.indices

    made = torch.func.vmap(best)(raw()[0, :, 0])
    assert made[:, 0, 0, 0].tolist() == [line[0] for line in SETS[0]]


def test_a_layout_and_attention_of_a_compiled_selection() -> None:
    """Made inside a compiled region, or outside and given to it, before or after sets were made."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 4, 4))

    def inside(indices: Tensor) -> Tensor:
        select = fs.Selection.from_indices(indices, kv_len=4, q_len=1, out_of_range="drop")
        return fs.attention(q, k, v, select=select, backend="tiles")

    def outside(select: fs.Selection) -> Tensor:
        return fs.attention(q, k, v, select=select, backend="tiles")

    want = fs.reference(q, k, v, select=chosen(raw())).out.float()
    options: dict[str, Any] = {"fullgraph": True, "backend": "eager"}
    torch.testing.assert_close(torch.compile(inside, **options)(raw()), want)
    select = chosen(raw())
    run = torch.compile(outside, **options)
    torch.testing.assert_close(run(select), want)
    assert select.indices.tolist() == SETS
    torch.testing.assert_close(run(select), want)


def test_attention_asks_again_with_the_same_selection(sorts: list[int]) -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 4, 4))
    indices = raw()
    select = chosen(indices)
    first = fs.attention(q, k, v, select=select, backend="tiles")
    indices.fill_(-1)
    again = fs.attention(q, k, v, select=select, backend="tiles")
    assert torch.equal(first, again) and len(sorts) == 1


@pytest.mark.parametrize("alias", [Tensor.numpy, Tensor.detach, torch.from_dlpack])
def test_on_a_cpu_a_selection_is_of_what_it_was_given_whoever_writes_there(
    monkeypatch: pytest.MonkeyPatch, alias: Callable[[Tensor], Any]
) -> None:
    monkeypatch.undo()
    indices = raw()
    others = alias(indices)
    select = chosen(indices)
    others[...] = 0
    assert select.indices.tolist() == SETS and select.given is None


def fake(ask: Callable[[], Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        ask()


WATCHED: dict[str, Callable[[Callable[[], Tensor]], Any]] = {
    "grad": lambda ask: torch.func.grad(lambda x: (x * ask()).sum())(torch.ones(4)),
    "jvp": lambda ask: torch.func.jvp(lambda x: x * ask(), (torch.ones(4),), (torch.ones(4),)),
    "vmap": lambda ask: torch.func.vmap(lambda x: x * ask())(torch.ones(3, 4)),
    "functionalize": lambda ask: torch.func.functionalize(lambda x: x * ask())(torch.ones(4)),
    "fake": fake,
    "make_fx": lambda ask: make_fx(lambda x: x * ask())(torch.ones(4)),
}


@pytest.mark.parametrize("under", WATCHED.values(), ids=WATCHED)
def test_sets_that_are_asked_for_under_a_transform_outlive_it(
    under: Callable[[Callable[[], Tensor]], Any],
) -> None:
    select = chosen(raw())
    under(lambda: select.indices)
    assert type(select.indices) is Tensor and not is_functorch_wrapped_tensor(select.indices)
    assert torch.equal(select.indices, torch.tensor(SETS, dtype=torch.int32))


def test_who_counts_operations_sees_those_that_make_sets() -> None:
    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    select = chosen(raw())
    with Counted() as counted:
        assert select.indices.dtype == torch.int32
    assert counted.calls > 0


def ask_into(select: fs.Selection, found: list[Tensor]) -> None:
    found.append(select.indices)


def test_threads_are_given_the_same_sets() -> None:
    for _ in range(30):
        select = chosen(torch.randint(0, 4, (1, 64, 1, 4)))
        found: list[Tensor] = []
        ask = [Thread(target=ask_into, args=(select, found)) for _ in range(4)]
        for thread in ask:
            thread.start()
        for thread in ask:
            thread.join()
        assert len(found) == 4 and all(sets is select.indices for sets in found)
        select.indices.fill_(0)
        assert select.held._version > 0


def test_a_compiler_may_read_a_copy_of_what_was_given() -> None:
    """Inductor copies what does not stand evenly, and what it replays."""

    def copies(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        return lambda *args: graph(*(a.clone() if isinstance(a, Tensor) else a for a in args))

    indices = raw()
    indices.add_(0)
    run = torch.compile(lambda s: s.indices + 0, fullgraph=True, backend=copies)
    assert run(chosen(indices)).tolist() == SETS


def shaken(draw: st.DrawFn, shape: tuple[int, ...], candidates: int) -> Tensor:
    """Any numbers, in any strides: repeats, -1, below and beyond."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    low, high = draw(st.sampled_from([(-1, candidates), (-3, candidates + 4), (-2, 0)]))
    made = torch.randint(low, high, shape, generator=seed)
    if draw(st.booleans()):
        made = made.int()
    elif draw(st.booleans()):
        made[..., :1] += 2**40
    axes = draw(st.sampled_from([(0, 1), (1, 2), (2, 3)]))
    return made.transpose(*axes).contiguous().transpose(*axes)


def nested(draw: st.DrawFn, tile: int) -> int:
    """A block of some whole tiles, or of which some make a tile."""
    if draw(st.booleans()):
        return tile * draw(st.integers(1, 3))
    return draw(st.sampled_from([n for n in range(1, tile + 1) if not tile % n]))


@st.composite
def conversions(
    draw: st.DrawFn, tokens: bool
) -> tuple[Tensor, int, Tensor | None, Geometry, Lists]:
    length = st.sampled_from([1, 7, 63, 64, 65, 200])
    q_tile = draw(st.sampled_from([1, 2, 8, 16, 20, 48, 128]))
    kv_tile = draw(st.sampled_from([16, 24, 48, 128]))
    blocks = (1, 1)
    if not tokens:
        blocks = (nested(draw, q_tile), nested(draw, kv_tile))
    g = Geometry(draw(length), draw(length), *blocks, q_tile, kv_tile)
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    query_heads = kv_heads * group
    fold = draw(st.sampled_from([1, kv_heads]))
    heads = draw(st.sampled_from(sorted({1, kv_heads, query_heads})))
    candidates = math.ceil(g.kv_len / blocks[1])
    shape = (
        draw(st.sampled_from(sorted({1, batch}))),
        heads,
        math.ceil(g.q_len / blocks[0]),
        draw(st.integers(1, 40)),
    )
    indices = shaken(draw, shape, candidates)
    codes = None
    if draw(st.booleans()):
        over = (draw(st.sampled_from(sorted({1, batch}))), query_heads, *g.tiles)
        seed = torch.Generator().manual_seed(shape[-1])
        codes = torch.randint(0, 3, over, generator=seed, dtype=torch.int8)
    return (
        indices,
        candidates,
        codes,
        g,
        Lists(batch * fold, query_heads // fold, fold, query_heads),
    )


def by_sets(
    indices: Tensor, candidates: int, codes: Tensor | None, g: Geometry, lists: Lists, asks: bool
) -> rows.RowTiles:
    sets = dedupe.by_sorts(indices, candidates, min(indices.shape[-1], candidates))
    return rows.row_tiles(sets, candidates, codes, g, lists, words=asks)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(conversions(tokens=True))
def test_tiles_by_words_are_those_of_sets(
    conversion: tuple[Tensor, int, Tensor | None, Geometry, Lists],
) -> None:
    made = words.token_tiles(*conversion)
    for ours, theirs in zip(made, by_sets(*conversion, True), strict=True):
        assert torch.equal(ours, theirs)


def test_on_a_cpu_only_sets_will_do() -> None:
    g, lists = Geometry(1, 4, 1, 1, 16, 16), Lists(1, 2, 1, 2)
    assert given_tiles(raw(), 4, None, g, lists, words=True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [False, True], ids=["blocks", "tokens"])
def test_the_kernels_take_what_was_given(tokens: bool) -> None:
    """Bit for bit what plain torch makes of sets."""
    from flexsparse.kernels import triton_sorted

    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(conversions(tokens), st.booleans())
    def check(conversion: tuple[Tensor, int, Tensor | None, Geometry, Lists], marks: bool) -> None:
        indices, candidates, codes, g, lists = conversion
        asks = tokens or marks
        there = None if codes is None else codes.cuda()
        turned = indices.cuda()
        made = given_tiles(turned, candidates, there, g, lists, words=asks)
        wanted = by_sets(*conversion, asks)
        assert made is not None or g.rows_per_tile > 1
        ways = [] if made is None else [made]
        if triton_sorted.takes(indices.shape[-1], g):
            how = (candidates, there, g, lists, asks)
            ways.append(rows.by_kernel(triton_sorted, turned, *how)[1])
        numbers = g.rows_per_tile * indices.shape[-1] * g.tiles_per_candidate
        assert ways or numbers > triton_sorted.MOST
        for way in ways:
            for ours, theirs in zip(way, wanted, strict=True):
                assert torch.equal(ours.cpu(), theirs)
        if tokens:
            marked = words.marked(turned, candidates)
            assert torch.equal(marked.cpu(), words.marked(indices, candidates))
            found, _ = words.tile_codes(marked, there, g, lists)
            twin, _ = words.by_words(marked.cpu(), codes, g, lists)
            assert torch.equal(found.cpu(), twin)
            rooms = (g.row_capacity(indices.shape[-1]),) * 2
            for ours, theirs in zip(tile_lists(found, rooms), tile_lists(twin, rooms), strict=True):
                assert torch.equal(ours.cpu(), theirs)

    check()


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [1, 2, 33, 1000, 1024, 1025])
@pytest.mark.parametrize("columns", [31, 1024, 1025, 2000])
def test_long_rows_and_wide_maps(kept: int, columns: int) -> None:
    """About the most that is sorted in place, and the most bits that are written whole."""
    draw = torch.Generator().manual_seed(kept)
    indices = torch.randint(-2, columns + 3, (2, 2, 5, kept), generator=draw)
    g, lists = Geometry(5 * 16, columns * 16, 16, 16, 16, 16), Lists(2, 2, 1, 2)
    made = given_tiles(indices.cuda(), columns, None, g, lists, words=False)
    if kept > 1024:
        assert made is None
        return
    assert made is not None
    for ours, theirs in zip(made, by_sets(indices, columns, None, g, lists, False), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [(1, 1), (128, 128)], ids=["tokens", "blocks"])
@pytest.mark.parametrize("grads", [False, True])
def test_a_plan_lays_out_what_was_given(
    blocks: tuple[int, int], grads: bool, sorts: list[int]
) -> None:
    q, k, v = (torch.randn(2, 4, 640, 64, device="cuda", requires_grad=grads) for _ in range(3))
    lengths: dict[str, Any] = {"kv_len": 640, "q_len": 640, "out_of_range": "drop"}
    lengths |= {"q_block": blocks[0], "kv_block": blocks[1]}
    there = 640 // blocks[1]
    draw = torch.Generator().manual_seed(0)
    shape = (2, 1, 640 // blocks[0], min(there, 32))
    indices = torch.randint(-1, there + 2, shape, generator=draw).cuda()
    make = lambda: fs.Selection.from_indices(indices, **lengths)  # noqa: E731
    options: dict[str, Any] = {"rule": Causal(), "tile": (128, 128), "backend": "flex"}
    plan = fs.make_plan(q, k, v, select=make(), **options)
    sorts.clear()
    quick = plan.layout(make())
    assert not sorts
    asked = make()
    assert asked.indices.shape[-1] == shape[-1]
    slow = plan.layout(asked)
    for ours, theirs in zip(
        [*quick.lists, *quick.tables], [*slow.lists, *slow.tables], strict=True
    ):
        assert torch.equal(ours, theirs)
    assert (quick.columns is None) is not grads
    if quick.columns is not None and slow.columns is not None:
        assert torch.equal(quick.columns.degrees, slow.columns.degrees)
    true = fs.reference(q, k, v, rule=Causal(), select=asked).out
    torch.testing.assert_close(plan.run(q, k, v, quick).out.double(), true, atol=5e-3, rtol=5e-3)
    # What was laid out stays right when the tensor changes; what was not read before is refused.
    other = plan.layout(make())
    indices.fill_(0)
    for made in (other, slow):
        torch.testing.assert_close(plan.run(q, k, v, made).out.double(), true, atol=5e-3, rtol=5e-3)
    with pytest.raises(fs.FlexSparseError, match=CHANGED):
        _ = quick.select.indices if quick.select is not None else None


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [(1, 1), (128, 128)], ids=["tokens", "blocks"])
def test_a_graph_reads_what_its_selection_was_given(blocks: tuple[int, int]) -> None:
    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda") for _ in range(3))
    there = 512 // blocks[1]
    draw = torch.Generator().manual_seed(0)
    fresh = lambda: torch.randint(-1, there, (1, 2, 512 // blocks[0], 3), generator=draw)  # noqa: E731
    indices = fresh().cuda()

    def select() -> fs.Selection:
        return fs.Selection.from_indices(
            indices, kv_len=512, q_len=512, q_block=blocks[0], kv_block=blocks[1],
            out_of_range="drop",
        )  # fmt: skip

    plan = fs.make_plan(q, k, v, select=select(), tile=(128, 128), backend="flex")
    graph, layout = captured(lambda: plan.layout(select()))
    for _ in range(3):
        indices.copy_(fresh())
        graph.replay()
        for ours, theirs in zip(layout.lists, plan.layout(select()).lists, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(layout.select.indices, select().indices)
        assert torch.equal(layout.dense(), select().dense().expand(1, 2, -1, -1))
    outside = select()
    with (
        pytest.raises(fs.FlexSparseError, match="read select.indices once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        plan.layout(outside)
    kept = outside.indices
    captured(lambda: plan.layout(outside))
    assert outside.indices is kept


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_regions_that_read_copies_of_what_was_given(mode: str) -> None:
    """An uneven view is copied, and so is what a graph replays; neither is a change."""
    run = torch.compile(lambda s: s.indices + 0, fullgraph=True, mode=mode)
    draw = torch.Generator().manual_seed(0)
    room = torch.zeros(1, 2, 1, 5, dtype=torch.int64, device="cuda")
    for _ in range(6):
        fresh = torch.randint(-1, 4, (1, 2, 1, 4), generator=draw)
        room[..., 1:] = fresh.cuda()
        assert torch.equal(run(chosen(room[..., 1:])).cpu(), chosen(fresh).indices)
