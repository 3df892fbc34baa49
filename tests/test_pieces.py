"""Rows and columns of tiles cut into pieces: the same tiles, the same results, and when it is chosen."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import flexsparse as fs
from flexsparse import lengths
from flexsparse.backends import Call, Work, flex, tiles
from flexsparse.choice import BACKENDS
from flexsparse.device import Ceilings
from flexsparse.kernels import pieces
from flexsparse.kernels.compress import compress, expand
from flexsparse.kernels.cut import Laid, cut_lists
from flexsparse.kernels.tile_bits import tile_bits
from flexsparse.masks import Causal, Softcap
from flexsparse.measure.draws import long_tailed, past_blocks
from flexsparse.rates import CUTTING

COLUMNS = 30


def drawn_lists(shape: tuple[int, int, int], seed: int) -> list[Tensor]:
    """Lists by row, partial and full, some of which are much longer than the others."""
    draw = torch.Generator().manual_seed(seed)
    most = torch.where(torch.rand(shape, generator=draw) < 0.6, 2, COLUMNS)
    listed = torch.rand(*shape, COLUMNS, generator=draw).argsort(-1) < most[..., None]
    partial = listed & (torch.rand(listed.shape, generator=draw) < 0.5)
    return [*compress(partial), *compress(listed & ~partial)]


@pytest.mark.parametrize("slots", [1, 5, 40])
@pytest.mark.parametrize("longest", [1, 2, 7, 29, 30])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 6), (1, 3, 9)])
def test_every_tile_is_walked_once(shape: tuple[int, int, int], longest: int, slots: int) -> None:
    lists = drawn_lists(shape, longest)
    cut = cut_lists(lists, longest, slots, Laid(4, 35))
    own = cut.owner[..., None].expand(-1, -1, -1, COLUMNS).long()
    for i, rest in ((0, cut.partial_num), (2, cut.full_num)):
        visits = expand(rest, lists[i + 1], COLUMNS).int()
        visits.scatter_add_(2, own, expand(cut.lists[i], cut.lists[i + 1], COLUMNS).int())
        assert torch.equal(visits, expand(lists[i], lists[i + 1], COLUMNS).int())
        used = torch.arange(cut.lists[i + 1].shape[-1]) < cut.lists[i][..., None]
        assert bool(((cut.lists[i + 1].diff(dim=-1) > 0) | ~used[..., 1:]).all()), "lists rise"
    assert int((cut.lists[0] + cut.lists[2]).max()) <= longest
    number = lists[0] + lists[2]
    rest = cut.partial_num + cut.full_num
    needed = torch.where(number > longest, -(-number // longest), 0).sum(-1)
    long_left = (rest > longest).any(-1)
    # Lists stay whole only where slots are short.
    assert bool((~long_left | (needed > slots)).all())


def test_the_last_list_can_be_left_whole() -> None:
    lists = [torch.full((1, 1, 2), 4, dtype=torch.int32), torch.arange(4).int().expand(1, 1, 2, 4)]
    lists += [torch.zeros_like(lists[0]), torch.zeros_like(lists[1])]
    cut = cut_lists(lists, 2, 8, Laid(4, 7), but_last=True)
    assert cut.partial_num.tolist() == [[[0, 4]]]
    assert cut.parts.tolist() == [[[2, 0, 0, 0, 0, 0, 0, 0]]]


def test_lists_of_one_kind_may_be_narrower() -> None:
    """Those of a rule are as wide as their longest needs."""
    partial = torch.zeros(1, 1, 1, 30, dtype=torch.bool)
    full = ~partial
    partial[..., 0], full[..., 0] = True, False
    cut = cut_lists([*compress(partial, 2), *compress(full, 29)], 10, 3, Laid(1, 1))
    assert cut.lists[1].shape == cut.lists[3].shape == (1, 1, 3, 10)
    assert cut.lists[0].tolist() == [[[1, 0, 0]]] and cut.lists[2].tolist() == [[[9, 10, 10]]]
    found = torch.cat(
        [row[:n] for row, n in zip(cut.lists[3][0, 0], cut.lists[2][0, 0], strict=True)]
    )
    assert found.tolist() == list(range(1, 30))


@pytest.mark.gpu
@pytest.mark.parametrize("but_last", [False, True])
@pytest.mark.parametrize("slots", [1, 5, 700])
@pytest.mark.parametrize("longest", [1, 7, 30])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 9), (1, 2, 1500)])
def test_lists_are_cut_by_a_kernel_as_by_its_twin(
    shape: tuple[int, int, int], longest: int, slots: int, but_last: bool, device: torch.device
) -> None:
    lists = drawn_lists(shape, slots)
    laid = Laid(48, shape[-1] * 48 - 5)
    twin = cut_lists(lists, longest, slots, laid, but_last=but_last)
    here = [x.to(device) for x in lists]
    kernel = cut_lists(here, longest, slots, laid, but_last=but_last)
    for a, b in zip(tree_leaves(kernel), tree_leaves(twin), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b)
    assert torch.equal(tile_bits(here, COLUMNS).cpu(), tile_bits(lists, COLUMNS))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_their_twins(dtype: torch.dtype, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    size, length, dim, slots = 16, 91, 24, 20
    cut = cut_lists(drawn_lists((2, 1, 6), 3), 4, slots, Laid(size, length))
    place = cut.place

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    x, out, found = (
        normal(2, 4, length, dim),
        normal(2, 4, length, dim),
        normal(2, 4, slots * size, dim),
    )
    own = torch.randn(2, 4, slots * size, generator=draw)
    own[torch.rand(own.shape, generator=draw) < 0.3] = -torch.inf
    d_out, d_lse = normal(2, 4, length, dim), torch.randn(2, 4, length, generator=draw)
    given = [x, out, found, own, d_out, d_lse, place, cut.owner, cut.parts]

    def run(where: torch.device) -> list[Tensor]:
        x, out, found, own, d_out, d_lse, place, owner, parts = (t.to(where) for t in given)
        results = []
        for ahead in (False, True):
            taken = pieces.take(x, place, owner, parts, ahead)
            results += [taken, pieces.untake(taken, owner, parts, length, ahead)]
        lse = torch.zeros(2, 4, length, device=where)
        joined = pieces.join_pieces(out, lse, found, own, place, owner, parts)
        results += joined
        # Of the same outputs: what is a rounding there would be more than one here.
        same = (t.to(where) for t in (d_out, d_lse, before[0], found, before[2], place))
        results += pieces.unjoin_pieces(*same)
        return [t.cpu() for t in results]

    before = pieces.join_pieces(
        out, torch.zeros(2, 4, length), found, own, place, cut.owner, cut.parts
    )
    for kernel, twin in zip(run(device), run(torch.device("cpu")), strict=True):
        torch.testing.assert_close(kernel, twin)


def uneven(
    seed: int = 0, longest: int = 12, rows: int = 12, q_len: int | None = None
) -> fs.Selection:
    """Lists of three blocks of 16, and one of ``longest``; -1 fills the rest. For 2 KV heads."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(1, 2, rows, 12, generator=draw).argsort(-1)
    keep = torch.full((rows,), 3)
    keep[rows // 2] = longest
    chosen = torch.where(torch.arange(12) < keep[:, None], chosen, -1)
    q_len = rows * 16 if q_len is None else q_len
    return fs.Selection.from_indices(chosen, kv_len=192, q_len=q_len, q_block=16, kv_block=16)


def inputs(q_len: int = 192, grads: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    lengths = (("q", 4, q_len), ("k", 2, 192), ("v", 2, 192))
    return [
        torch.randn(1, heads, n, 16, generator=draw).requires_grad_(grads)
        for _, heads, n in lengths
    ]


OPTIONS: dict[str, Any] = {"rule": Causal(), "backend": "tiles", "tile": 16}


def same(result: Any, qkv: list[Tensor], select: fs.Selection, **options: Any) -> None:
    true = fs.reference(*qkv, rule=Causal(), select=select, **options)
    torch.testing.assert_close(result.out, true.out.to(result.out.dtype), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.lse, true.lse.to(result.lse.dtype), atol=1e-5, rtol=1e-5)


def test_what_was_not_foreseen_is_as_exact() -> None:
    """More and longer rows than the plan has slots for stay whole."""
    qkv = inputs()
    plan = fs.make_plan(*qkv, select=uneven(longest=6), split=4, **OPTIONS)
    worse = fs.Selection.from_indices(
        torch.arange(12).expand(1, 2, 12, 12).contiguous(), kv_len=192, q_len=192, q_block=16, kv_block=16
    )  # fmt: skip
    layout = plan.layout(worse)
    assert layout.launches is not None and layout.launches.rows is not None
    # Rows 4 to 11 have more than 4 tiles.
    assert int((layout.launches.whole[0] + layout.launches.whole[2]).max()) == 12
    same(plan.run(*qkv, layout, return_lse=True), qkv, worse)


def test_pieces_are_written_in_place() -> None:
    qkv = inputs()
    plan = fs.make_plan(*qkv, select=uneven(), split=4, **OPTIONS)
    layout = plan.layout(uneven())
    held, _ = tree_flatten(layout.launches)
    memory = [t.data_ptr() for t in held if isinstance(t, Tensor)]
    other = uneven(5, longest=9)
    assert plan.layout(other, into=layout) is layout
    now, _ = tree_flatten(layout.launches)
    assert [t.data_ptr() for t in now if isinstance(t, Tensor)] == memory
    fresh, _ = tree_flatten(plan.layout(other).launches)
    for a, b in zip(now, fresh, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    same(plan.run(*qkv, layout, return_lse=True), qkv, other)
    changed = other.indices.clone()
    changed[:, :, 3] = torch.arange(12)
    third = fs.Selection.from_indices(changed, kv_len=192, q_len=192, q_block=16, kv_block=16)
    plan.layout(third, into=layout, rows=range(3, 4))
    same(plan.run(*qkv, layout, return_lse=True), qkv, third)


def test_cut_layouts_advance() -> None:
    qkv = inputs(q_len=16)
    offset = torch.tensor(100)
    select = uneven(longest=12, rows=1)
    plan = fs.make_plan(*qkv, select=select, split=2, q_offset=offset, **OPTIONS)
    layout = plan.layout(select)
    plan.advance(layout, by=30)
    same(plan.run(*qkv, layout, return_lse=True), qkv, select, q_offset=130)


def test_chunks_of_a_cut_plan() -> None:
    qkv, select = inputs(), uneven()
    plan = fs.make_plan(*qkv, select=select, split=4, **OPTIONS)
    whole = plan.run(*qkv).out
    part = plan.chunk(64, 128).run(qkv[0][:, :, 64:128], *qkv[1:]).out
    torch.testing.assert_close(part, whole[:, :, 64:128])


@pytest.mark.parametrize("grads", [False, True], ids=["forward", "backward"])
def test_inside_compiled_code(grads: bool) -> None:
    qkv, select = inputs(grads=grads), uneven()
    plan = fs.make_plan(*qkv, select=select, split=4, **OPTIONS)

    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        chosen = fs.Selection.from_indices(
            indices, kv_len=192, q_len=192, q_block=16, kv_block=16, out_of_range="drop"
        )
        return plan.run(q, k, v, plan.layout(chosen)).out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    indices = uneven(3).indices
    got, plain = compiled(*qkv, indices), step(*qkv, indices)
    torch.testing.assert_close(got, plain)
    if grads:
        weight = torch.randn_like(got)
        for a, b in zip(*(torch.autograd.grad(x, qkv, weight) for x in (got, plain)), strict=True):
            torch.testing.assert_close(a, b)


def test_unlisted_keys_are_never_read() -> None:
    qkv, select = inputs(grads=True), uneven()
    seen = torch.zeros(12, dtype=torch.bool)
    seen[:6] = True
    few = fs.Selection.from_indices(
        torch.where(select.indices < 6, select.indices, -1), kv_len=192, q_len=192, q_block=16, kv_block=16
    )  # fmt: skip
    hidden = (~seen).repeat_interleave(16)[:, None]
    poisoned = [
        qkv[0],
        *(x.detach().masked_fill(hidden, torch.nan).requires_grad_() for x in qkv[1:]),
    ]
    plan = fs.make_plan(*qkv, select=few, split=2, **OPTIONS)
    for x in (qkv, poisoned):
        for leaf in x:
            leaf.grad = None
        plan.run(*x).out.sum().backward()
    torch.testing.assert_close(poisoned[1].grad, qkv[1].grad)
    torch.testing.assert_close(poisoned[2].grad, qkv[2].grad)


def test_the_same_bits_twice() -> None:
    qkv, select = inputs(grads=True), uneven()
    plan = fs.make_plan(*qkv, select=select, split=2, **OPTIONS)
    once, twice = (torch.autograd.grad(plan.run(*qkv).out.sum(), qkv) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_launches_are_part_of_the_tree() -> None:
    plan = fs.make_plan(*inputs(grads=True), select=uneven(), split=4, **OPTIONS)
    layout = plan.first
    assert layout is not None
    leaves, spec = tree_flatten(layout)
    again = tree_unflatten(leaves, spec)
    assert again.launches.whole[0] is layout.launches.whole[0]
    assert layout.to("cpu").launches.columns.parts is not None
    for launches in (layout.launches, layout.to("meta").launches):
        for lists in (launches.whole, launches.pieces, launches.trained):
            assert len(lists) == 8
            assert lists[1].stride() == lists[3].stride()
            assert lists[5].stride() == lists[7].stride()


def test_a_plan_says_that_it_cuts() -> None:
    qkv = inputs()
    assert "more than 4 tiles are cut" in str(
        fs.make_plan(*qkv, select=uneven(), split=4, **OPTIONS)
    )
    assert fs.make_plan(*qkv, select=uneven(), **OPTIONS).terms.cuts is None


@pytest.mark.parametrize("grads", [False, True], ids=["forward", "backward"])
def test_every_step_launches_the_same_programs(
    grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is found again by the program and score that it ran."""
    qkv, select, launched = inputs(grads=grads), uneven(), []
    options = OPTIONS | {"tile": (32, 16), "pack": "fold", "score": Softcap(3.0)}
    plan = fs.make_plan(*qkv, select=select, split=2, cluster=True, **options)
    own = tiles.run

    def run(work: Work) -> tuple[Tensor, Tensor | None]:
        launched.append((work.layout.program, work.score))
        return own(work)

    monkeypatch.setattr(tiles, "run", run)
    for _ in range(2):
        plan.run(*qkv)
    first, second = launched[: len(launched) // 2], launched[len(launched) // 2 :]
    assert len(first) == 2
    for (program, score), (again, score_again) in zip(first, second, strict=True):
        assert program is again and score is score_again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tile", [(16, 16), (64, 64), (128, 128)])
@pytest.mark.parametrize("q_len", [1, 7, 192])
def test_torch_is_told_of_each_launch_what_it_is(
    q_len: int, tile: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of few queries are many rows, which torch's decoding kernel does not take."""
    q, k, v = (torch.randn(1, 2, n, 64, dtype=dtype) for n in (q_len, 192, 192))
    seen: list[Work] = []
    told: list[dict[str, Any]] = []
    own = tiles.run

    def run(work: Work) -> tuple[Tensor, Tensor | None]:
        seen.append(work)
        return own(work)

    monkeypatch.setattr(tiles, "run", run)
    monkeypatch.setattr(flex, "run_with", lambda work, options: told.append(options))
    plan = fs.make_plan(q, k, v, select=uneven(rows=-(-q_len // 16), q_len=q_len), split=1, tile=tile, backend="tiles")  # fmt: skip
    plan.run(q, k, v)
    assert len(seen) == 2 and seen[1].q.shape[2] >= 128
    for work in seen:
        with FakeTensorMode():
            q, k, v = (torch.empty(x.shape, dtype=dtype, device="cuda") for x in work[:3])
        flex.run(work._replace(q=q, k=k, v=v))
        options, rows = told.pop(), q.shape[2]
        if options.get("FORCE_USE_FLEX_ATTENTION"):
            # torch's own tiles on Hopper.
            mine = (128, 128) if dtype == torch.bfloat16 else (128, 32)
            for at, name in enumerate(("fwd_BLOCK_M", "fwd_BLOCK_N")):
                assert tile[at] % options.get(name, mine[at]) == 0
        else:
            assert rows < 128 and tile[0] % max(16, rows) == 0
        assert not options.get("IS_DIVISIBLE", rows % 128 == 0) or rows % tile[0] == 0


@pytest.mark.parametrize("split", [True, 0, -1, 1.5, "long"])
def test_what_split_may_be(split: Any) -> None:
    with pytest.raises(fs.FlexSparseError, match="split must be None"):
        fs.attention(*inputs(), select=uneven(), split=split)


def test_who_cannot_cut_says_so() -> None:
    with pytest.raises(fs.FlexSparseError, match="split=3 cannot be had here"):
        fs.attention(*inputs(), select=uneven(), split=3, backend="gather")


# ms on one H200: S=32768, 32 query heads over 8 KV heads of 128, tiles of 128, 1 % of rows with 30 % of the
# work; whole and in pieces of 24 tiles, the kernels alone.
MEASURED = {
    ("flex", False): (1.518, 1.307),
    ("flex", True): (5.502, 5.813),
    ("flash", False): (0.963, 2.056),
    ("flash", True): (4.55, 6.157),
}


@pytest.mark.parametrize("grads", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("tail", [None, (0.01, 0.3)], ids=["even", "long-tailed"])
@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_long_rows_are_cut_where_that_was_measured_to_pay(
    backend: str, tail: tuple[float, float] | None, grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the counts of a layout and what one H200 was measured to reach."""
    length, keep = 32768, 4
    draw = torch.Generator().manual_seed(0)
    counts: Tensor | int = keep
    if tail is not None:
        counts = long_tailed(length, 8, (128, 128), keep, tail, draw)
    chosen = past_blocks(length, 8, 128, 128, counts, draw)
    select = fs.Selection.from_indices(
        chosen, kv_len=length, q_len=length, q_block=128, kv_block=128
    )
    q, k = (torch.empty(1, heads, length, 16) for heads in (32, 8))
    plan = fs.make_plan(q, k, k, select=select, backend="tiles", tile=128, pack="fold")
    assert plan.first is not None
    monkeypatch.setattr(lengths, "ceilings", lambda *_: Ceilings(4e12, 7.2e14, 132))
    call = Call(
        torch.device("cpu"), torch.bfloat16, 128, 128, length, grads, False, False, plan.program, None
    )  # fmt: skip
    rows = plan.first.kv_num_blocks + plan.first.full_kv_num_blocks
    why: list[str] = []
    cuts = lengths.weighed(rows, plan.first, BACKENDS[backend], call, why)
    whole, pieces = MEASURED[backend, grads]
    assert (cuts is not None) == (tail is not None and pieces < whole)
    if cuts is not None:
        assert keep < cuts.row <= 24 and "merged by lse" in why[0]
        predicted = re.search(r"([\d.]+) ms less", why[0])
        assert predicted is not None
        # That of kernels, less what a layout takes longer; the draw of rows is another.
        saved = float(predicted[1]) + 1e3 * CUTTING.layout
        assert saved == pytest.approx(whole - pieces, rel=0.25)
