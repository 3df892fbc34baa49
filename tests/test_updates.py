"""Layouts that change in their own tensors: other candidates, some rows of them, later positions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexsparse as fs
from flexsparse.masks import AttentionSink, Causal, Document, SlidingWindow
from tests.oracle import close

LENGTHS = [1, 7, 63, 64, 65, 200]
HEADS = (4, 2)


def tensors(q_len: int, kv_len: int, batch: int = 2, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, HEADS[0], q_len, 16)] + 2 * [(batch, HEADS[1], kv_len, 16)]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def drawn(
    q_len: int, kv_len: int, seed: int, *, heads: int = 2, q_block: int = 1, kv_block: int = 16
) -> fs.Selection:
    """Candidates with holes, repeats and, in the last row of the first head, none."""
    draw = torch.Generator().manual_seed(seed)
    rows, candidates = -(-q_len // q_block), -(-kv_len // kv_block)
    indices = torch.randint(-1, candidates, (2, heads, rows, 5), generator=draw)
    indices[:, :, :, 1] = indices[:, :, :, 0]
    if seed % 3 == 2:
        indices[0, 0, -1] = -1
    return fs.Selection.from_indices(
        indices, kv_len=kv_len, q_len=q_len, q_block=q_block, kv_block=kv_block
    )


def parts(layout: fs.Layout) -> Iterator[Tensor]:
    yield from layout.lists
    yield from layout.tables
    if layout.columns is not None:
        yield layout.columns.degrees


def places(layout: fs.Layout) -> list[int]:
    # Where all rows are listed, degrees are no tensor of the layout's.
    counted = layout.columns is not None and layout.columns.real is None
    return [t.data_ptr() for t in list(parts(layout))[: -1 if counted else None]]


def same(got: fs.Layout, want: fs.Layout) -> None:
    """The same tiles, tables and pairs; the lists of one may be wider."""
    for a, b in zip(got.tile_maps(), want.tile_maps(), strict=True):
        assert torch.equal(a, b)
    for ours, theirs in zip(parts(got), parts(want), strict=True):
        n = min(ours.shape[-1], theirs.shape[-1]) if ours.ndim else 0
        assert torch.equal(ours[..., :n], theirs[..., :n]) if n else torch.equal(ours, theirs)
        assert not ours[..., n:].any() and not theirs[..., n:].any() if n else True
    assert torch.equal(got.dense(), want.dense())


class NoLooking(TorchDispatchMode):
    """Refuses what would make the host wait for a device, or cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert "_local_scalar_dense" not in name and "nonzero" not in name, name
        assert "masked_select" not in name and "is_nonzero" not in name, name
        return func(*args, **(kwargs or {}))


CALLS = [
    {"rule": Causal()},
    {"rule": Causal() & (SlidingWindow(40) | AttentionSink(3)), "fallback": "self"},
    {"rule": None},
    {"rule": Causal(), "sanitize": True},
    {"rule": Causal(), "pack": "pack"},
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("options", CALLS, ids=["causal", "fallback", "none", "sanitize", "packed"])
@pytest.mark.parametrize(("heads", "q_block", "kv_block"), [(1, 1, 1), (2, 16, 32), (4, 24, 7)])
def test_other_candidates_in_the_same_tensors(
    length: int, options: Any, heads: int, q_block: int, kv_block: int
) -> None:
    q, k, v = tensors(length, length)
    if options.get("pack") and heads == 4:
        pytest.skip("a list a query head does not pack")
    kinds: Any = {"heads": heads, "q_block": q_block, "kv_block": kv_block}
    first = drawn(length, length, 0, **kinds)
    plan = fs.make_plan(q, k, v, select=first, tile=(16, 16), **options)
    layout = plan.layout(first)
    where = places(layout)
    for seed in (1, 2):
        select = drawn(length, length, seed, **kinds)
        assert plan.layout(select, into=layout) is layout
        assert layout.select is select and places(layout) == where
        same(layout, plan.layout(select))
    out = plan.run(q, k, v, layout).out
    true = fs.reference(q, k, v, rule=options["rule"], select=select,
                        fallback=options.get("fallback"))  # fmt: skip
    close(out, true.out)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("q_block", "kv_block"), [(1, 1), (1, 16), (16, 32), (24, 7), (64, 16)])
@pytest.mark.parametrize("grads", [False, True])
def test_rows_that_changed(length: int, q_block: int, kv_block: int, grads: bool) -> None:
    q, k, v = tensors(length, length)
    q.requires_grad_(grads)
    kinds: Any = {"q_block": q_block, "kv_block": kv_block}
    old, new = drawn(length, length, 0, **kinds), drawn(length, length, 2, **kinds)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=old, tile=(16, 16))
    rows = old.rows
    for changed in (
        range(rows // 2, rows // 2 + 1),
        range(0),
        range(rows // 3, rows),
        torch.tensor([rows - 1, 0, rows - 1, -1]),
        torch.tensor([], dtype=torch.int64),
        torch.arange(rows, dtype=torch.int32),
    ):
        indices = old.indices.clone()
        at = list(changed) if isinstance(changed, range) else changed[changed >= 0].tolist()
        indices[:, :, at] = new.indices[:, :, at]
        mixed = fs.Selection(indices, length, length, q_block, kv_block)
        layout = plan.layout(old)
        where = places(layout)
        plan.layout(mixed, into=layout, rows=changed)
        assert places(layout) == where
        same(layout, plan.layout(mixed))


def test_a_swap_of_rows_writes_no_other_row() -> None:
    """What was not named as changed is not looked at: that is what makes it cheap."""
    q, k, v = tensors(200, 200)
    old, new = drawn(200, 200, 0), drawn(200, 200, 1)
    plan = fs.make_plan(q, k, v, select=old, tile=(16, 16), pack="identity")
    layout, before = plan.layout(old), plan.layout(old)
    plan.layout(new, into=layout, rows=range(32, 48))
    for ours, theirs in zip(layout.lists, before.lists, strict=True):
        assert torch.equal(ours[:, :, :2], theirs[:, :, :2])
        assert torch.equal(ours[:, :, 3:], theirs[:, :, 3:])


def test_gradients_of_a_layout_written_in_place() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(65, 65))
    old, new = drawn(65, 65, 0), drawn(65, 65, 1)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=old, tile=16)
    layout = plan.layout(old)
    plan.layout(new, into=layout)
    got = torch.autograd.grad(plan.run(q, k, v, layout).out.square().sum(), (q, k, v))
    true = fs.reference(q, k, v, rule=Causal(), select=new).out.square().sum()
    torch.testing.assert_close(
        got, torch.autograd.grad(true, (q, k, v)), atol=1e-4, rtol=1e-4
    )  # fmt: skip


def test_what_cannot_be_written_into() -> None:
    q, k, v = tensors(65, 65)
    select = drawn(65, 65, 0)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select, tile=16)
    other = fs.make_plan(q, k, v, rule=Causal(), select=select, tile=16)
    with pytest.raises(fs.FlexSparseError, match="was not made by this plan"):
        plan.layout(select, into=other.layout(select))
    with pytest.raises(fs.FlexSparseError, match="into must be a Layout"):
        plan.layout(select, into=plan)  # type: ignore[arg-type]
    layout = plan.layout(select)
    for rows, said in (
        (range(60, 66), "among the 65 rows"),
        (torch.tensor([-2]), "among the 65 rows"),
        (torch.tensor([0.5]), "rows must be a range or an int tensor"),
        ([3], "rows must be a range or an int tensor"),
    ):
        with pytest.raises(fs.FlexSparseError, match=said):
            plan.layout(select, into=layout, rows=rows)  # type: ignore[arg-type]
    with pytest.raises(fs.FlexSparseError, match="into=layout"):
        plan.layout(select, rows=range(1))


def test_a_layout_without_room_is_refused() -> None:
    q, k, v = tensors(1, 200)
    one = fs.Selection.from_indices(torch.zeros(1, 1, 1, 1, dtype=torch.int64), kv_len=200, q_len=1)
    many = fs.Selection.from_indices(torch.arange(200).view(1, 1, 1, 200), kv_len=200, q_len=1)
    plan = fs.make_plan(q, k, v, select=one, tile=(16, 16))
    layout = plan.layout(one)
    with pytest.raises(fs.FlexSparseError, match="room for 1 tiles a row, but 200 candidates"):
        plan.layout(many, into=layout)
    wide = plan.layout(many)
    same(plan.layout(one, into=wide), plan.layout(one))


# Sequences that grow


def documents(kv_len: int) -> Tensor:
    ids = torch.arange(kv_len) // 50
    return torch.stack([ids, ids.flip(0).contiguous()])


def rules(kv_len: int) -> dict[str, Any]:
    return {
        "causal": Causal(),
        "window + sink": Causal() & (SlidingWindow(40) | AttentionSink(3)),
        "document": Causal() & Document(documents(kv_len)),
        "heads": fs.MaskRule.of(lambda b, h, q, kv: (q - kv) % (h + 2) == 0),
        "none": None,
    }


@pytest.mark.parametrize("name", ["causal", "window + sink", "document", "heads", "none"])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize(
    ("dtype", "pack"), [(torch.int32, None), (torch.int64, None), (torch.int64, "pack")]
)
def test_forty_steps_in_place_are_forty_plans(
    name: str, selected: bool, dtype: torch.dtype, pack: str | None
) -> None:
    q, k, v = tensors(1, 200)
    q_offset = torch.tensor([3, 130], dtype=dtype)
    options: dict[str, Any] = {"rule": rules(200)[name], "tile": (16, 16), "pack": pack}
    first = drawn(1, 200, 0) if selected else None
    plan = fs.make_plan(q, k, v, q_offset=q_offset, select=first, **options)
    layout = plan.layout(first)
    where = places(layout)
    for step in range(1, 41):
        select = drawn(1, 200, step) if selected else None
        assert plan.advance(layout, select=select) is layout
        assert places(layout) == where
        assert q_offset.tolist() == [3 + step, 130 + step]
        at = q_offset.clone()
        fresh = fs.make_plan(q, k, v, q_offset=at, select=select, **options)
        assert fresh.first is not None
        same(layout, fresh.first)
        got = plan.run(q, k, v, layout, return_lse=True)
        assert torch.equal(got.out, fresh.run(q, k, v).out)
        if step in (1, 20, 40):
            true = fs.reference(
                q, k, v, rule=options["rule"], select=select, q_offset=at
            )  # fmt: skip
            close(got.out, true.out)
            close(got.partial.lse, true.lse)
    if not selected:
        assert plan.layout() is layout
        close(plan.run(q, k, v).out, true.out)


@pytest.mark.parametrize("q_len", [1, 7, 63, 64, 65])
def test_several_queries_move_by_several_positions(q_len: int) -> None:
    """Steps of each sequence's own, and back."""
    q, k, v = tensors(q_len, 200)
    q_offset = torch.tensor([-2, 90])
    rule = Causal() & (SlidingWindow(33) | AttentionSink(2))
    plan = fs.make_plan(q, k, v, rule=rule, q_offset=q_offset, tile=(16, 32))
    layout = plan.layout()
    by: Any
    for by in (torch.tensor([5, 0]), 17, torch.tensor([3, 28], dtype=torch.int32), -9, 0):
        plan.advance(layout, by=by)
        fresh = fs.make_plan(q, k, v, rule=rule, q_offset=q_offset.clone(), tile=(16, 32))
        assert fresh.first is not None
        same(layout, fresh.first)
    close(plan.run(q, k, v, layout).out, fs.reference(q, k, v, rule=rule, q_offset=q_offset).out)


@pytest.mark.parametrize("selected", [False, True])
def test_a_step_asks_the_host_nothing(selected: bool) -> None:
    from flexsparse.moving import move
    from flexsparse.updating import update

    q, k, v = tensors(1, 200)
    first, second = (drawn(1, 200, i) if selected else None for i in (0, 1))
    rule = rules(200)["document"]
    offset = torch.tensor([3, 130])
    plan = fs.make_plan(q, k, v, rule=rule, q_offset=offset, select=first, tile=(16, 16))
    layout = plan.advance(plan.layout(first), by=0)
    with NoLooking():
        move(plan.terms, plan.ahead, 1)
        ahead = replace(plan.ahead, versions=plan.program.versions(plan.grid))
        update(layout, plan.terms, second, ahead)
        if second is not None:
            update(layout, plan.terms, second, ahead, torch.tensor([0, -1]))
    fresh = fs.make_plan(q, k, v, rule=rule, q_offset=offset, select=second, tile=(16, 16))
    assert fresh.first is not None
    same(layout, fresh.first)


def test_a_plan_knows_its_own_steps_from_others() -> None:
    q, k, v = tensors(1, 65)
    q_offset = torch.tensor([3, 9])
    select = drawn(1, 65, 0)
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=q_offset, select=select, tile=(16, 16))
    layout, other = plan.layout(select), plan.layout(select)
    where = places(layout)
    plan.advance(layout)
    with pytest.raises(fs.FlexSparseError, match="has changed since this layout was made"):
        plan.run(q, k, v, other)
    same(plan.layout(select, into=other), layout)
    q_offset += 20
    with pytest.raises(fs.FlexSparseError, match="has changed since this layout was made"):
        plan.advance(layout)
    with pytest.raises(fs.FlexSparseError, match="has changed since this layout was made"):
        plan.layout(select, into=layout, rows=range(1))
    plan.layout(select, into=layout)
    assert places(layout) == where
    plan.advance(layout)
    fresh = fs.make_plan(q, k, v, rule=Causal(), q_offset=torch.tensor([25, 31]), select=select,
                         tile=(16, 16))  # fmt: skip
    assert fresh.first is not None
    same(layout, fresh.first)
    close(plan.run(q, k, v, layout).out,
          fs.reference(q, k, v, rule=Causal(), q_offset=q_offset, select=select).out)  # fmt: skip


def test_positions_set_anew_are_written_into_the_same_lists() -> None:
    """A new sequence in the same buffers: the rule alone."""
    q, k, v = tensors(1, 200)
    q_offset = torch.tensor([3, 130])
    rule = rules(200)["window + sink"]
    plan = fs.make_plan(q, k, v, rule=rule, q_offset=q_offset, tile=(16, 16))
    layout = plan.advance(plan.layout())
    where = places(layout)
    q_offset.copy_(torch.tensor([77, 0]))
    assert plan.layout(into=layout) is layout and places(layout) == where
    for _ in range(2):
        fresh = fs.make_plan(q, k, v, rule=rule, q_offset=q_offset.clone(), tile=(16, 16))
        assert fresh.first is not None
        same(layout, fresh.first)
        plan.advance(layout)


def test_nobody_moves_past_the_keys() -> None:
    from flexsparse.moving import move

    q, k, v = tensors(2, 65)
    q_offset = torch.tensor([3, 62])
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=q_offset, tile=(16, 16))
    layout = plan.advance(plan.layout())
    with pytest.raises(fs.FlexSparseError, match="past the last of 65 keys, at offset 63"):
        plan.advance(layout)
    assert q_offset.tolist() == [4, 63]
    plan.advance(layout, by=torch.tensor([1, 0]))
    # As where the host does not look.
    plan.raise_pending(layout)
    move(plan.terms, plan.ahead, 1)
    assert q_offset.tolist() == [6, 63]
    with pytest.raises(fs.FlexSparseError, match="past the last of 65 keys"):
        plan.raise_pending(layout)


def test_what_does_not_advance() -> None:
    q, k, v = tensors(1, 65)
    offset = torch.tensor([3, 4])
    fixed = fs.make_plan(q, k, v, rule=Causal(), q_offset=3)
    learning = fs.make_plan(q, k.requires_grad_(), v, rule=Causal(), q_offset=offset)
    k.requires_grad_(False)
    lacking = {fixed: "needs q_offset as an int tensor", learning: "needs a plan without gradients"}
    for plan, said in lacking.items():
        with pytest.raises(fs.FlexSparseError, match=said):
            plan.advance(plan.layout())
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=offset)
    by: Any
    for by, said in (
        (1.5, "by must be an int"),
        (torch.ones(3, dtype=torch.int64), "by must be an int or like q_offset"),
        (torch.ones(2), "by must be an int or an int tensor"),
    ):
        with pytest.raises(fs.FlexSparseError, match=said):
            plan.advance(plan.layout(), by=by)
    short = fs.MaskRule.of(lambda b, h, q, kv, t=torch.arange(8): t[q] >= kv)
    plan = fs.make_plan(q, k, v, rule=short, q_offset=offset)
    with pytest.raises(fs.FlexSparseError, match="at index 64 of axis 0, which has 8"):
        plan.advance(plan.layout())
    assert offset.tolist() == [3, 4]


def test_a_sequence_grows_in_inference_mode() -> None:
    with torch.inference_mode():
        q, k, v = tensors(1, 65)
        offset = torch.tensor([3, 4])
        plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=offset, tile=(16, 16))
        layout = plan.layout()
        where = places(layout)
        for _ in range(20):
            plan.advance(layout)
        assert places(layout) == where
        true = fs.reference(q, k, v, rule=Causal(), q_offset=offset).out
        close(plan.run(q, k, v, layout).out, true)


def test_a_layout_keeps_its_room_when_the_plan_has_come_to_more() -> None:
    """Of a plan whose tiles single queries decide."""
    length, rows = 256, 16
    even = (torch.arange(rows)[:, None] + torch.arange(3)) % rows
    uneven = even.clone()
    uneven[:, 0] = 3
    of = {"kv_len": length, "q_len": length, "q_block": 16, "kv_block": 16}
    first, second = (fs.Selection.from_indices(x[None, None], **of) for x in (even, uneven))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 16, generator=draw).requires_grad_() for _ in range(3))
    plan = fs.make_plan(q, k, v, select=first, tile=16, fallback="self", backend="tiles")
    layout = plan.first
    assert layout is not None and layout.columns is not None
    before = layout.columns.room
    plan.run(q, k, v, plan.layout(second)).out.sum().backward()
    made = plan.layout(second)
    assert made.columns is not None and not before.holds(made.columns.needed())
    for select in (first, second, first):
        plan.layout(select, into=layout)
        grads = []
        for run in (
            plan.run(q, k, v, layout),
            fs.reference(q, k, v, select=select, fallback="self"),
        ):
            weights = torch.linspace(-1, 1, run.out.numel(), dtype=run.out.dtype)
            loss = (run.out * weights.view_as(run.out)).sum()
            grads.append(torch.autograd.grad(loss, (q, k, v)))
        for got, want in zip(*grads, strict=True):
            close(got, want)


SHARED: dict[str, Any] = {
    "copy": copy.copy,
    "to": lambda layout: layout.to("cpu"),
    "with columns": lambda layout: layout.with_columns(),
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_shares_the_tensors_of_a_layout_is_outdated_with_it(kind: str) -> None:
    """Whoever writes: the tensors hold one selection at a time, and only its layout may be run."""
    q, k, v = tensors(64, 64)
    first, second = (drawn(64, 64, seed, kv_block=1) for seed in (0, 1))
    plan = fs.make_plan(q, k, v, rule=Causal(), select=first, tile=16, backend="tiles")

    def right(layout: fs.Layout, select: fs.Selection) -> None:
        true = fs.reference(q, k, v, rule=Causal(), select=select).out
        torch.testing.assert_close(
            plan.run(q, k, v, layout).out.double(), true, atol=5e-6, rtol=1e-5
        )

    def outdated(layout: fs.Layout) -> None:
        with pytest.raises(fs.FlexSparseError, match="was written anew"):
            plan.run(q, k, v, layout)
        with pytest.raises(fs.FlexSparseError, match="was written anew"):
            plan.layout(second, into=layout, rows=range(3))

    for turned in (False, True):
        layout = plan.layout(first)
        other = SHARED[kind](layout)
        right(other, first)
        mine, theirs = (other, layout) if turned else (layout, other)
        plan.layout(second, into=mine)
        right(mine, second)
        outdated(theirs)
        # Written as a whole it is right again, and the other is not.
        plan.layout(first, into=theirs)
        right(theirs, first)
        outdated(mine)


def test_a_result_keeps_a_layout_that_is_outdated_with_the_one_given() -> None:
    q, k, v = tensors(64, 64)
    first, second = (drawn(64, 64, seed, kv_block=1) for seed in (0, 1))
    plan = fs.make_plan(q, k, v, select=first, tile=16, backend="tiles")
    layout = plan.layout(first)
    turned = plan.run(q, k.requires_grad_(), v, layout).layout
    assert turned is not layout
    plan.layout(second, into=layout)
    with pytest.raises(fs.FlexSparseError, match="was written anew"):
        plan.run(q, k, v, turned)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "device"])
def test_a_copy_with_tensors_of_its_own_is_not_outdated(how: str) -> None:
    q, k, v = tensors(64, 64)
    first, second = (drawn(64, 64, seed, kv_block=1) for seed in (0, 1))
    plan = fs.make_plan(q, k, v, select=first, tile=16, backend="tiles")
    layout = plan.layout(first)
    made: dict[str, Callable[[fs.Layout], fs.Layout]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "device": lambda x: x.to("meta"),
    }
    other, was = made[how](layout), layout.dense()
    plan.layout(second, into=layout)
    assert other.versions.current and layout.versions.current
    if how != "device":
        assert torch.equal(other.dense(), was) and not torch.equal(layout.dense(), was)
    before = [other.versions.knows(x.writes) for x in (other, layout)]
    assert before == [True, False]
