"""Candidates to tiles by row and by column: against loops over every row, candidate and tile."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexsparse as fs
from flexsparse.errors import LayoutError
from flexsparse.kernels import columns, dedupe, membership, rows
from flexsparse.kernels.compress import compress
from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.selectors import Random


def by_hand(indices: Tensor, codes: Tensor | None, g: Geometry, lists: Lists) -> tuple[Any, Any]:
    """Sets of partial and of full tiles, list by list and row by row."""
    tile_rows, tile_columns = g.tiles
    group = lists.query_heads // lists.fold
    found: dict[str, list[list[set[int]]]] = {"partial": [], "full": []}
    for entry in range(lists.batch):
        for lane in range(lists.heads):
            b, h = entry // lists.fold, entry % lists.fold * group + lane
            sel = indices[min(b, len(indices) - 1), h * indices.shape[1] // lists.query_heads]
            for name in found:
                found[name].append([])
            for r in range(tile_rows):
                queries = range(r * g.q_tile, min((r + 1) * g.q_tile, g.q_len))
                sets = [set(sel[q // g.q_block].tolist()) for q in queries]
                kinds: dict[str, set[int]] = {"partial": set(), "full": set()}
                for c in range(tile_columns):
                    keys = range(c * g.kv_tile, min((c + 1) * g.kv_tile, g.kv_len))
                    seen = [k // g.kv_block in s for s in sets for k in keys]
                    code = 2
                    if codes is not None:
                        at = codes[min(b, len(codes) - 1), h * codes.shape[1] // lists.query_heads]
                        code = int(at[r, c])
                    if any(seen) and code:
                        kinds["full" if all(seen) and code == 2 else "partial"].add(c)
                for name, tiles in kinds.items():
                    found[name][-1].append(tiles)
    return found["partial"], found["full"]


def listed(counts: Tensor, slots: Tensor) -> list[list[set[int]]]:
    """Lists as sets; they must rise, and unused slots hold 0."""
    out = []
    for count, slot in zip(counts.flatten(0, 1), slots.flatten(0, 1), strict=True):
        out.append([])
        for n, tiles in zip(count.tolist(), slot.tolist(), strict=True):
            assert tiles[:n] == sorted(set(tiles[:n]))
            assert not any(tiles[n:])
            out[-1].append(set(tiles[:n]))
    return out


@st.composite
def conversions(draw: st.DrawFn) -> tuple[Tensor, int, Tensor | None, Geometry, Lists]:
    length = st.sampled_from([1, 7, 63, 64, 65, 100])
    block = st.sampled_from([1, 3, 16, 24, 64, 200])
    g = Geometry(
        draw(length), draw(length), draw(block), draw(block),
        draw(st.sampled_from([1, 2, 8, 16, 32, 48, 128])), draw(st.sampled_from([16, 32, 48, 128])),
    )  # fmt: skip
    batch, kv_heads, group = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
    )
    query_heads = kv_heads * group
    fold = draw(st.sampled_from([1, kv_heads]))
    heads = draw(st.sampled_from(sorted({1, kv_heads, query_heads})))
    sel_batch = draw(st.sampled_from(sorted({1, batch})))
    candidates = math.ceil(g.kv_len / g.kv_block)
    kept = draw(st.integers(1, min(candidates + 2, 40)))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = (sel_batch, heads, math.ceil(g.q_len / g.q_block), kept)
    indices = torch.randint(-1, candidates, shape, generator=seed)
    indices = dedupe.sorted_unique(indices, candidates, min(kept, candidates))
    codes = None
    if draw(st.booleans()):
        code_shape = (
            draw(st.sampled_from(sorted({1, batch}))),
            draw(st.sampled_from(sorted({1, query_heads}))),
            *g.tiles,
        )
        codes = torch.randint(0, 3, code_shape, generator=seed, dtype=torch.int8)
    own_heads = query_heads // fold
    return indices, candidates, codes, g, Lists(batch * fold, own_heads, fold, query_heads)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(conversions())
def test_row_and_column_lists_are_what_a_loop_finds(
    conversion: tuple[Tensor, int, Tensor | None, Geometry, Lists],
) -> None:
    indices, candidates, codes, g, lists = conversion
    made = rows.row_tiles(indices, candidates, codes, g, lists)
    partial, full = by_hand(indices, codes, g, lists)
    assert listed(made.partial_num, made.partial_idx) == partial
    assert listed(made.full_num, made.full_idx) == full
    turned = columns.column_tiles(made.bits, g.tiles[1], columns.Room(g.tiles[0], g.tiles[0]))
    for name, num, idx in (
        (partial, turned.partial_num, turned.partial_idx),
        (full, turned.full_num, turned.full_idx),
    ):
        wanted = [
            [{r for r, tiles in enumerate(rows_of) if c in tiles} for c in range(g.tiles[1])]
            for rows_of in name
        ]
        assert listed(num, idx) == wanted
    assert torch.equal(made.words, membership.pack(indices, candidates))
    bare = rows.row_tiles(indices, candidates, codes, g, lists, words=False)
    assert bare.words.numel() == 0 and torch.equal(bare.bits, made.bits)


def test_bits_hold_a_map() -> None:
    present = torch.rand(3, 5, 77, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.equal(rows.unpack_bits(rows.pack_bits(present), 77), present)


def test_columns_beyond_their_room_are_told() -> None:
    """What does not fit is counted, so that whoever asked can ask again with more room."""
    bits = rows.pack_bits(torch.ones(2, 1, 1, 9, 5, dtype=torch.bool))
    made = columns.column_tiles(bits, 5, columns.Room(4, 9))
    assert made.needed() == columns.Room(9, 9) and made.room == columns.Room(4, 9)
    assert made.partial_num.tolist() == [[[4] * 5]] and made.full_num.tolist() == [[[9] * 5]]
    assert made.partial_idx[0, 0, 0].tolist() == [0, 1, 2, 3]
    assert made.full_idx[0, 0, 0].tolist() == list(range(9))


@pytest.mark.parametrize("room", [(1, 1), (4, 30), (7, 2), (30, 30)])
def test_both_kinds_of_a_column_have_the_same_strides(room: tuple[int, int]) -> None:
    """torch 2.11 reads the full ones by the strides of the partial; elsewhere than at multiples of 16 bytes
    torch copies an input."""
    draw = torch.Generator().manual_seed(0)
    bits = rows.pack_bits(torch.rand(2, 2, 3, 30, 11, generator=draw) < 0.3)
    made = columns.column_tiles(bits, 11, columns.Room(*room))
    lists = list(made[:4])
    for num, idx, full_num, full_idx in (lists, columns.moved(lists, "meta")):
        assert (idx.shape[-1], full_idx.shape[-1]) == room
        assert num.stride() == full_num.stride() and idx.stride() == full_idx.stride()
        batch, head, _, slot = idx.stride()
        assert slot == 1 and batch == 3 * head
        assert idx.storage_offset() % 4 == full_idx.storage_offset() % 4 == 0
        assert idx.untyped_storage().nbytes() == 4 * 66 * columns.Room(*room).slots
    whole = columns.column_tiles(bits, 11, columns.Room(30, 30))
    assert torch.equal(made.partial_idx[..., :1], whole.partial_idx[..., :1])
    assert torch.equal(made.full_idx[..., :1], whole.full_idx[..., :1])


def test_what_a_column_has_room_for() -> None:
    assert columns.Room(1, 89).grown(1024) == columns.Room(4, 112)
    assert columns.Room(0, 6).grown(6) == columns.Room(4, 6)
    assert columns.Room(4, 112).holds(columns.Room(4, 112))
    assert not columns.Room(4, 112).holds(columns.Room(5, 1))
    assert not columns.Room(4, 112).holds(columns.Room(1, 113))


def training(selects: fs.Selection, **options: Any) -> tuple[fs.Plan, list[Tensor]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 320, 8, requires_grad=True) for _ in range(3))
    return fs.make_plan(q, k, v, select=selects, tile=16, backend="tiles", **options), [q, k, v]


def spread(column: int | None, kv_block: int = 16) -> fs.Selection:
    """Each row of queries its own block, or all of them one block; full tiles, or parts of tiles."""
    own = torch.arange(20).view(1, 1, 20, 1)
    indices = (own if column is None else torch.full_like(own, column)) * (16 // kv_block)
    return fs.Selection.from_indices(indices, kv_len=320, q_len=320, kv_block=kv_block, q_block=16)


@pytest.mark.parametrize("split", [None, 8], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", ["partial", "full"])
def test_a_plan_gives_columns_the_room_they_need_and_regrows(kind: str, split: int | None) -> None:
    """A selection that leans on one column, in a plan made from an even one, loses no gradient."""
    block = 16 if kind == "full" else 8
    even, uneven = spread(None, block), spread(3, block)
    plan, inputs = training(even, split=split)
    assert plan.first is not None and plan.first.columns is not None
    assert plan.terms.columns == plan.first.columns.room == columns.Room(4, 4)
    crowded = plan.layout(uneven)
    told = f"visited by 20 rows of {kind} tiles, but .* room for 4"
    with pytest.raises(fs.FlexSparseError, match=told):
        plan.raise_pending(crowded)
    out = plan.run(*inputs, crowded).out
    got = torch.autograd.grad(out.square().sum(), inputs)
    true = torch.autograd.grad(fs.reference(*inputs, select=uneven).out.square().sum(), inputs)
    torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)
    grown = columns.Room(4, 20) if kind == "full" else columns.Room(20, 4)
    assert plan.terms.columns == grown
    plan.raise_pending(plan.layout(uneven))


def test_full_tiles_leave_the_room_of_partial_ones_small() -> None:
    """Of blocks that fill tiles only the diagonal is masked inside."""
    q, k, v = (torch.randn(1, 2, 4096, 16, requires_grad=True) for _ in range(3))
    select = Random(block=64, keep=8, q_block=64)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select, tile=64, backend="tiles")
    assert plan.first is not None and plan.first.columns is not None
    made, needed = plan.first.columns, plan.first.columns.needed()
    assert needed.partial == 1 and needed.full > 8 and made.room == needed.grown(64)
    slots = made.partial_idx.untyped_storage().nbytes() // 4
    assert slots == 2 * 64 * sum(made.room)
    # As much as two lists for the worst column of either kind less what the partial ones need not.
    assert slots == 2 * 64 * (2 * made.room.full - (made.room.full - 4))
    kept = 4 * (slots + made.partial_num.numel() + made.full_num.numel())
    by_row = sum(t.nbytes for t in plan.first.lists[:4])
    assert sum(t.nbytes for t in plan.first.lists) == by_row + kept
    mask = plan.first.block_mask
    assert mask.q_indices is not None and mask.full_q_indices is not None
    assert mask.q_indices.shape == mask.full_q_indices.shape == (1, 2, 64, 64)
    assert mask.q_indices.is_contiguous() and mask.full_q_indices.is_contiguous()
    moved = plan.first.to("meta")
    assert moved.columns is not None
    assert moved.columns.partial_idx.stride() == moved.columns.full_idx.stride()
    assert moved.columns.room == made.room


def test_a_plan_without_gradients_makes_no_lists_by_column() -> None:
    q = torch.randn(1, 2, 64, 8)
    plan = fs.make_plan(q, q, q, rule=Causal(), tile=16)
    assert plan.first is not None and plan.first.columns is None
    leaf = q.clone().requires_grad_()
    (got,) = torch.autograd.grad(plan.run(leaf, leaf, leaf).out.sum(), leaf)
    (true,) = torch.autograd.grad(fs.reference(leaf, leaf, leaf, rule=Causal()).out.sum(), leaf)
    torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


def test_tiles_that_rule_and_candidates_both_cut_are_settled_when_asked() -> None:
    """Key 60 in the future of every query but the last four: no pair of the first tiles."""
    indices = torch.full((1, 1, 64, 1), 60)
    select = fs.Selection.from_indices(indices, kv_len=64, q_len=64)
    options: dict[str, Any] = {
        "rule": SlidingWindow(8), "select": select, "grid": fs.Grid(64, 64), "heads": (1, 1),
        "block_size": 32,
    }  # fmt: skip
    exact, quick = fs.build_layout(**options), fs.build_layout(**options, exact=False)
    assert exact.kv_num_blocks.tolist() == [[[0, 1]]]
    assert quick.kv_num_blocks.sum() >= exact.kv_num_blocks.sum()
    assert torch.equal(exact.dense(), quick.dense())
    assert int(exact.logical_pairs) == int(quick.logical_pairs) == 4


def check_rewriting(
    conversion: tuple[Tensor, int, Tensor | None, Geometry, Lists], device: str
) -> None:
    """Other candidates into the same tensors, all rows and then some, without or with wider lists."""
    indices, candidates, codes, g, lists = conversion
    turned = dedupe.sorted_unique(
        torch.where(indices < 0, -1, candidates - 1 - indices), candidates, indices.shape[-1]
    )
    old, new = (rows.row_tiles(x, candidates, codes, g, lists) for x in (indices, turned))
    codes = None if codes is None else codes.to(device)
    wide = [torch.nn.functional.pad(x, (0, 3), value=7) if x.ndim == 4 else x for x in old[:4]]
    into = rows.RowTiles(*(x.to(device).clone() for x in (*wide, old.bits, old.words)))
    where = [x.data_ptr() for x in into]
    rows.rewrite(turned.to(device), candidates, codes, g, lists, into)
    check = [*into[:4]]
    for i in (1, 3):
        assert not check[i][..., -3:].any()
        check[i] = check[i][..., :-3]
    for got, want in zip((*check, *into[4:]), new, strict=True):
        assert torch.equal(got.cpu(), want)
    at = torch.tensor([g.tiles[0] - 1, 0, g.tiles[0] - 1], device=device)
    rows.rewrite(indices.to(device), candidates, codes, g, lists, into, at)
    assert [x.data_ptr() for x in into] == where
    for i, (got, was, now) in enumerate(zip(into, new, old, strict=True)):
        want = was.clone()
        if i < 4:
            want[:, :, at.cpu()] = now[:, :, at.cpu()]
            got = got[..., : want.shape[-1]]
        assert torch.equal(got.cpu(), want)


class OfADevice(Tensor):
    is_cuda = True


@pytest.mark.parametrize("some", [False, True], ids=["all", "some rows"])
def test_lists_that_a_kernel_rewrites_count_as_changed(
    some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which torch, whose count it is, knows nothing: a backward would read other tiles."""
    kernel = SimpleNamespace(writes_whole=lambda _: True, fill=lambda *_: None)
    monkeypatch.setattr(rows, "_kernel", lambda *_: kernel)
    indices = torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    g, lists = Geometry(32, 32, 16, 16, 16, 16), Lists(1, 1, 1, 1)
    into = rows.row_tiles(indices, 2, None, g, lists)
    before = [x._version for x in into]
    at = torch.tensor([1]) if some else None
    rows.rewrite(indices.as_subclass(OfADevice), 2, None, g, lists, into, at)
    changed = [now._version > then for now, then in zip(into, before, strict=True)]
    assert changed == [True] * 4 + [not some] * 2


@settings(deadline=None, derandomize=True, max_examples=60)
@given(conversions())
def test_lists_are_rewritten_where_they_are(
    conversion: tuple[Tensor, int, Tensor | None, Geometry, Lists],
) -> None:
    check_rewriting(conversion, "cpu")


@pytest.mark.gpu
@settings(deadline=None, derandomize=True, max_examples=60)
@given(conversions())
def test_the_kernels_rewrite_lists_where_they_are(
    conversion: tuple[Tensor, int, Tensor | None, Geometry, Lists],
) -> None:
    check_rewriting(conversion, "cuda")


@pytest.mark.gpu
@settings(deadline=None, derandomize=True, max_examples=60)
@given(conversions())
def test_the_kernels_are_their_twins(
    conversion: tuple[Tensor, int, Tensor | None, Geometry, Lists],
) -> None:
    """The Triton kernels give, bit for bit, what plain torch gives on CPU."""
    indices, candidates, codes, g, lists = conversion
    made = rows.row_tiles(indices, candidates, codes, g, lists)
    there = rows.row_tiles(
        indices.cuda(), candidates, None if codes is None else codes.cuda(), g, lists
    )
    for ours, theirs in zip(made, there, strict=True):
        assert torch.equal(ours, theirs.cpu())
    bare = rows.row_tiles(indices.cuda(), candidates, None, g, lists, words=False)
    assert bare.words.numel() == 0
    plain = rows.row_tiles(indices, candidates, None, g, lists, words=False)
    for ours, theirs in zip(plain[:5], bare[:5], strict=True):
        assert torch.equal(ours, theirs.cpu())
    for room in {columns.Room(1, 1), columns.Room(1, 6), columns.Room(*[g.tiles[0]] * 2)}:
        turned = columns.column_tiles(made.bits, g.tiles[1], room)
        there_turned = columns.column_tiles(there.bits, g.tiles[1], room)
        for ours, theirs in zip(turned, there_turned, strict=True):
            assert torch.equal(ours, theirs.cpu()) and ours.stride() == theirs.stride()
    draw = torch.Generator().manual_seed(candidates)
    raw = torch.randint(-2, candidates + 3, (2, 3, 5, indices.shape[-1] + 3), generator=draw)
    for form in (raw, raw.int(), raw.transpose(1, 2)):
        twin = dedupe.sorted_unique(form, candidates, min(form.shape[-1], candidates))
        kernel = dedupe.sorted_unique(form.cuda(), candidates, twin.shape[-1])
        assert torch.equal(twin, kernel.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [1, 2, 33, 1000, 2048, 5000])
def test_many_candidates_a_row(kept: int) -> None:
    """Token candidates by the thousand: the histogram, and lists longer than registers hold."""
    draw = torch.Generator().manual_seed(kept)
    indices = torch.randint(-1, 5000, (1, 2, 70, kept), generator=draw)
    unique = dedupe.sorted_unique(indices, 5000, min(kept, 5000))
    assert torch.equal(unique, dedupe.sorted_unique(indices.cuda(), 5000, min(kept, 5000)).cpu())
    g = Geometry(70, 5000, 1, 1, 32, 64)
    lists = Lists(1, 4, 1, 4)
    made = rows.row_tiles(unique, 5000, None, g, lists)
    for ours, theirs in zip(made, rows.row_tiles(unique.cuda(), 5000, None, g, lists), strict=True):
        assert torch.equal(ours, theirs.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 31, 256, 3000])
def test_a_map_is_compressed_alike_everywhere(columns: int) -> None:
    present = torch.rand(2, 3, 5, columns, generator=torch.Generator().manual_seed(columns)) < 0.3
    for capacity in {1, columns}:
        for form in (present, present.transpose(1, 2)):
            ours, theirs = compress(form, capacity), compress(form.cuda(), capacity)
            assert all(torch.equal(a, b.cpu()) for a, b in zip(ours, theirs, strict=True))


def test_no_tile_is_looked_at_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which on a CPU can only be said."""
    monkeypatch.setattr("flexsparse.building.on_device_only", lambda device: True)
    indices = torch.zeros(1, 1, 64, 2, dtype=torch.int64)
    select = fs.Selection.from_indices(indices, kv_len=64, q_len=64)
    call: dict[str, Any] = {
        "rule": Causal(),
        "select": select,
        "grid": fs.Grid(64, 64),
        "heads": (1, 1),
    }
    with pytest.raises(LayoutError, match="captured: pass exact=False"):
        fs.build_layout(**call)
    dense = fs.build_layout(**call, exact=False).dense()
    monkeypatch.undo()
    assert torch.equal(dense, fs.build_layout(**call).dense())
