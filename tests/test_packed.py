"""Query heads beside their queries: the map, the lists, the counts, and how tall tiles are chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexsparse as fs
from flexsparse.address import FoldedHeads, Identity, PackedHeads
from flexsparse.backends import flex
from flexsparse.kernels.geometry import Geometry, Lists
from flexsparse.kernels.rows import by_map
from flexsparse.masks import Alibi, Causal, SlidingWindow
from flexsparse.overlap import best_rows, tiles_met
from flexsparse.reference import allowed


def nsa(
    length: int, shared: int, *, lists: int = 2, block: int = 64, kept: int = 16, batch: int = 1
) -> fs.Selection:
    """Per-token lists of past blocks, the first and the own among them; ``shared`` neighbours agree."""
    draw = torch.Generator().manual_seed(shared)
    query = torch.arange(length)
    leader = query // shared * shared
    blocks = -(-length // block)
    rank = torch.rand(batch, lists, length, blocks, generator=draw)[:, :, leader]
    rank = rank.masked_fill(torch.arange(blocks) > (leader // block)[:, None], -1)
    rank[..., 0] = 3
    rank.scatter_(-1, (query // block).expand(batch, lists, -1)[..., None], 2.0)
    best = rank.topk(min(kept, blocks), -1)
    indices = torch.where(best.values < 0, -1, best.indices)
    return fs.Selection.from_indices(indices, kv_len=length, q_len=length, kv_block=block)


def inputs(
    length: int, heads: tuple[int, int], *, batch: int = 1, dim: int = 16, **made: Any
) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(length)
    shapes = (batch, heads[0], length, dim), *2 * [(batch, heads[1], length, dim)]
    return tuple(torch.randn(s, generator=draw).to(**made) for s in shapes)


# ---- the map


@pytest.mark.parametrize("kind", [Identity, FoldedHeads, PackedHeads])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (16, 1), (9, 3), (1, 1)])
def test_the_map_goes_both_ways(kind: type[Identity], heads: tuple[int, int]) -> None:
    address = kind(*heads)
    b, h, q = torch.meshgrid(*(torch.arange(n) for n in (3, heads[0], 5)), indexing="ij")
    entry, lane, row = address.kernel(b, h, q)
    assert int(entry.max()) == address.kernel_batch(3) - 1
    assert int(lane.max()) == address.kernel_heads[0] - 1
    assert int(row.max()) == 5 * address.rows_per_query - 1
    assert [x.tolist() for x in address.logical(entry, lane, row, q)[:3]] == [
        x.tolist() for x in (b, h, q)
    ]
    x = torch.randn(3, heads[0], 5, 2)
    packed = address.pack(x, "q")
    assert torch.equal(packed[entry, lane, row], x)
    assert torch.equal(address.unpack(packed, 3), x)
    assert torch.equal(address.unpack(packed[..., 0], 3), x[..., 0])


def test_keys_and_values_are_not_copied() -> None:
    _, k, _ = inputs(20, (6, 2), batch=3)
    assert PackedHeads(6, 2).pack(k, "k").data_ptr() == k.data_ptr()


# ---- lists and counts


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 200])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (8, 2), (32, 2)])
def test_lists_and_counts_are_those_of_a_loop(size: int, heads: tuple[int, int]) -> None:
    """Tiles whose rows are heads as well: listed where any of their pairs is seen, full where all are."""
    q, k, v = inputs(size, heads, batch=2)
    group = heads[0] // heads[1]
    select = nsa(size, 2, lists=heads[1], block=16, kept=3, batch=2)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select, pack="pack", tile=16)
    layout = plan.layout(select)
    rows, keys = plan.tile
    assert rows == (18 if group == 3 else math.lcm(16, group))
    every = torch.arange(size)
    seen = allowed(plan.grid, heads[0], rule=Causal(), select=select, fallback=None, rows=every)
    assert torch.equal(layout.dense(), seen)
    packed = plan.address.pack(seen, "q")[:, 0]
    touched = full = 0
    partial_map, full_map = layout.tile_maps()
    for entry, r, c in torch.cartesian_prod(
        *(torch.arange(n) for n in (2 * heads[1], *layout.span.tiles))
    ).tolist():
        tile = packed[entry, r * rows : (r + 1) * rows, c * keys : (c + 1) * keys]
        touched += bool(tile.any())
        full += bool(tile.all())
        assert bool(full_map[entry, 0, r, c]) == bool(tile.all())
        # What candidates and rule each leave something of may still be nothing together.
        assert bool(partial_map[entry, 0, r, c]) >= (bool(tile.any()) and not bool(tile.all()))
    budget = layout.budget()
    assert budget.logical_pairs == int(seen.sum())
    assert budget.full_tiles == full
    assert budget.physical_tiles == int((partial_map | full_map).sum()) >= touched
    assert budget.physical_pairs == budget.physical_tiles * rows * keys
    assert budget.dense_pairs == seen.numel()
    reads = budget.kv_bytes_if
    assert budget.kv_bytes == reads.per_kv_head
    assert reads.per_query_head == group * reads.per_kv_head
    per_list = (partial_map | full_map).view(2, heads[1], *layout.span.tiles)
    assert (
        reads.shared * int(per_list.sum())
        == reads.per_kv_head * int(per_list.any(1).sum()) * heads[1]
    )


def test_a_tile_of_one_query_asks_no_membership() -> None:
    q, k, v = inputs(130, (16, 1))
    select = nsa(130, 1, lists=1, block=64, kept=2)
    for rows, asks in ((16, False), (32, True)):
        plan = fs.make_plan(q, k, v, select=select, pack="pack", tile=(rows, 64))
        assert plan.program.asks_member(plan.tile) == asks
        assert fs.check(q, k, v, select=select, pack="pack", tile=(rows, 64)).ok


def test_a_rule_by_head_is_full_only_where_all_heads_of_a_tile_see_all() -> None:
    q, k, v = inputs(64, (4, 2))
    select = fs.Selection.from_indices(
        torch.arange(4).expand(1, 2, 64, -1), kv_len=64, q_len=64, kv_block=16
    )
    rule = fs.MaskRule.of(lambda b, h, q, kv: (kv < 16) | (h > 0) & (kv >= 32))
    plan = fs.make_plan(q, k, v, rule=rule, select=select, pack="pack", tile=(128, 16))
    partial, full = plan.layout(select).tile_maps()
    # Of the first KV head one query head does not see the last two blocks; the second block nobody.
    assert partial[:, 0, 0].tolist() == [[False, False, True, True], [False] * 4]
    assert full[:, 0, 0].tolist() == [[True, False, False, False], [True, False, True, True]]
    assert fs.check(q, k, v, rule=rule, select=select, pack="pack", tile=(128, 16), grads=True).ok


def test_everything_at_once() -> None:
    """Slopes by head, sinks, offsets by sequence, a fallback, unseen NaN, gradients, lse."""
    heads, batch, length = (6, 2), 3, 65
    q, k, v = inputs(length, heads, batch=batch)
    select = nsa(length, 2, block=16, kept=2, batch=batch)
    slopes = torch.linspace(0.1, 1, 6).requires_grad_()
    sink = torch.linspace(-1, 1, 6).requires_grad_()
    options: dict[str, Any] = {
        "rule": Causal() & SlidingWindow(40), "select": select, "score": Alibi(slopes), "sink": sink,
        "q_offset": torch.tensor([0, -20, 7]), "fallback": ("local", 3),
    }  # fmt: skip
    for tile in (16, 48, None):
        report = fs.check(
            q, k, v, **options, sanitize=True, pack="pack", tile=tile, grads=True, backend="tiles"
        )
        report.raise_if_failed()
        assert isinstance(report.plan.address, PackedHeads)


# ---- what neighbours share


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_tiles_are_counted_as_the_lists_have_them(data: st.DataObject) -> None:
    pick = st.sampled_from
    length, keys = data.draw(pick([1, 7, 63, 64, 65, 200])), data.draw(pick([1, 65, 200]))
    q_block, kv_block = data.draw(pick([1, 3, 8])), data.draw(pick([1, 5, 16, 64, 300]))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    lists, batch = data.draw(pick([1, 2])), data.draw(pick([1, 3]))
    shape = (batch, lists, -(-length // q_block), 4)
    indices = torch.randint(-1, -(-keys // kv_block), shape, generator=draw)
    select = fs.Selection.from_indices(
        indices, kv_len=keys, q_len=length, q_block=q_block, kv_block=kv_block
    )
    sizes = [(1, 16), (2, 64), (8, 64), (12, 48)]
    found = tiles_met(select, fs.Grid(length, keys, batch=3), (8, 2), sizes)
    for tile, count in zip(sizes, found, strict=True):
        geometry = Geometry(length, keys, q_block, kv_block, *tile)
        made = by_map(select.indices, select.candidates, None, geometry, Lists(6, 1, 2, 8), False)
        assert count.tiles == int(made.partial_num.sum() + made.full_num.sum())
        # Where candidates are no smaller than tiles, what all queries touch all of them cover.
        assert count.agreed >= int(made.full_num.sum())
        if not kv_block % tile[1]:
            assert count.agreed == int(made.full_num.sum())


@pytest.mark.parametrize(("shared", "rows"), [(1, 16), (2, 32), (8, 128), (64, 128)])
def test_tiles_are_as_tall_as_neighbours_share(shared: int, rows: int) -> None:
    """Sixteen heads: a tile of 16 rows is one query, one of 128 eight. On an H200 blocks that two share
    took 3.9 ms in tiles of 16 rows, 2.9 in those of 32."""
    select, grid = nsa(8192, shared), fs.Grid(8192, 8192)
    chosen, times = best_rows(select, grid, (32, 2), 64)
    assert chosen == rows
    assert times == pytest.approx(1.0, abs=0.01)


def test_a_height_whose_tiles_are_too_many_is_no_choice() -> None:
    """Four queries a tile at half a million keys would be 1 GiB of verdicts on tiles."""
    length = 2**19
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(0, length // 64, (1, 1, length, 1), generator=draw)
    select = fs.Selection.from_indices(indices, kv_len=length, q_len=length, kv_block=64)
    assert best_rows(select, fs.Grid(length, length), (4, 1), 64)[0] == 64
    short = fs.Selection.from_indices(
        indices[:, :, :4096] % 64, kv_len=4096, q_len=4096, kv_block=64
    )
    assert best_rows(short, fs.Grid(4096, 4096), (4, 1), 64)[0] == 32


def test_a_sample_foretells_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    select, grid = nsa(8192, 2), fs.Grid(8192, 8192)
    sizes = [(1, 64), (4, 64), (8, 128)]
    whole = tiles_met(select, grid, (32, 2), sizes)
    monkeypatch.setattr("flexsparse.overlap._ENTRIES", 2**18)
    sample = tiles_met(select, grid, (32, 2), sizes)
    assert sample != whole
    for some, every in zip(sample, whole, strict=True):
        assert some[:2] == pytest.approx(every[:2], rel=0.05)
        # The longest of all is found by luck, or its like.
        assert some[2:] == pytest.approx(every[2:], rel=0.2)


def test_a_plan_packs_short_rows_and_says_why() -> None:
    q, k, v = inputs(2048, (32, 2))
    scattered, shared = (
        fs.make_plan(q, k, v, rule=Causal(), select=nsa(2048, n, kept=4)) for n in (1, 8)
    )
    assert isinstance(scattered.address, PackedHeads) and scattered.tile == (16, 64)
    assert isinstance(shared.address, PackedHeads) and shared.tile == (128, 64)
    assert "16 heads beside each query" in str(scattered)
    assert "tiles of 16x64: they visit 0.26 times the pairs of 128x128" in str(scattered)
    # What blocks are too fine, or pairs too few, to weigh on CPU has the height that a GPU's kernel takes.
    shared = fs.make_plan(q, k, v, rule=Causal(), select=nsa(2048, 8, kept=4, block=8))
    assert "neighbouring queries touch 1.0 times what one does" in str(shared)


@pytest.mark.parametrize(
    "reason", ["own lists", "long rows", "few queries", "one head a list", "three"]
)
def test_a_plan_does_not_pack_what_gains_nothing(reason: str) -> None:
    heads = {"one head a list": (2, 2), "three": (6, 2)}.get(reason, (8, 2))
    length = 64 if reason == "few queries" else 256
    q_block = 32 if reason == "long rows" else 1
    lists = heads[0] if reason == "own lists" else heads[1]
    indices = torch.zeros(1, lists, length // q_block, 1, dtype=torch.int64)
    select = fs.Selection.from_indices(
        indices, kv_len=length, q_len=length, q_block=q_block, kv_block=64
    )
    plan = fs.make_plan(*inputs(length, heads), select=select)
    assert not isinstance(plan.address, PackedHeads)


def test_lists_of_single_query_heads_are_not_packed() -> None:
    q, k, v = inputs(40, (4, 2))
    with pytest.raises(
        fs.FlexSparseError, match="the 2 query heads of a KV head into one tile.*own"
    ):
        fs.attention(q, k, v, select=nsa(40, 1, lists=4, block=16), pack="pack")


def test_a_compiled_region_does_not_measure(device: torch.device) -> None:
    """Nothing is read on the host there: tiles are as tall as they get, and the result is the same."""
    q, k, v = inputs(200, (4, 2))
    select, rule = nsa(200, 1, block=16, kept=3), Causal()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fs.attention(q, k, v, rule=rule, select=select, pack="pack")

    # Once outside: a rule is traced there.
    want = step(q, k, v)
    true = fs.reference(q, k, v, rule=rule, select=select).out
    got = torch.compile(step, fullgraph=True, backend="eager")(q, k, v)
    for out in (want, got):
        torch.testing.assert_close(out.double(), true, atol=1e-5, rtol=1e-5)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("grads", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128, None])
@pytest.mark.parametrize("shared", [1, 8])
def test_fused_packed_kernels_agree(
    shared: int, rows: int | None, grads: bool, device: torch.device
) -> None:
    q, k, v = inputs(1024, (16, 2), dim=64, device=device, dtype=torch.bfloat16)
    select = nsa(1024, shared, kept=6).to(device)
    tile = None if rows is None else (rows * 2, 64)
    with torch.set_grad_enabled(grads):
        report = fs.check(
            q,
            k,
            v,
            rule=Causal(),
            select=select,
            pack="pack",
            tile=tile,
            grads=grads,
            backend="flex",
        )
    report.raise_if_failed()
    wanted = (128, 128) if grads else tile
    assert wanted is None or report.plan.tile in (wanted, (256, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_sixteen_heads_a_query_agree_in_every_height(dim: int, device: torch.device) -> None:
    q, k, v = inputs(512, (32, 2), dim=dim, device=device, dtype=torch.bfloat16)
    select = nsa(512, 2, kept=4).to(device)
    with torch.no_grad():
        for rows in (16, 32, 64, 128):
            fs.check(
                q, k, v, rule=Causal(), select=select, pack="pack", tile=(rows, 64), backend="flex"
            ).raise_if_failed()


@pytest.mark.parametrize(("gathers", "stages"), [(0, 3), (1, 3), (2, 2), (3, 1)])
def test_short_tiles_hold_no_more_stages_than_tables_leave(gathers: int, stages: int) -> None:
    """A word a pair and table lies beside each stage of keys in a kernel's shared memory."""
    q = torch.empty((1, 4, 1024, 128), dtype=torch.bfloat16, device="meta")
    layout = fs.build_layout(rule=Causal(), grid=fs.Grid(64, 64), heads=(4, 4), block_size=(16, 64))
    said = flex.kernel_options(layout, q, q, gathers)
    assert said["fwd_num_stages"] == stages and said["fwd_BLOCK_M"] == 16
