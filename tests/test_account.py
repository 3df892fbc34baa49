"""What a run touches, by the backend that ran: counted again by loops over every pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.backends import decode
from flexsparse.backends.account import reads
from flexsparse.budget import Together, count
from flexsparse.masks import Alibi, Causal
from flexsparse.overlap import best_stepped, heights, stepped, tiles_met
from flexsparse.selection import Selection

HEADS = [(8, 2), (3, 3), (4, 1)]
PER_HEAD = fs.MaskRule.of(lambda b, h, q, kv: (kv <= q) & ((kv + h) % 3 > 0))


def qkv(heads: tuple[int, int], q_len: int, kv_len: int, batch: int = 2) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(batch, h, n, d, generator=draw)
        for h, n, d in ((heads[0], q_len, 16), (heads[1], kv_len, 16), (heads[1], kv_len, 24))
    )


def blocks(
    lists: int, q_len: int, kv_len: int, q_block: int, kv_block: int, kept: int, batch: int = 2
) -> Selection:
    draw = torch.Generator().manual_seed(1)
    shape = (batch, lists, math.ceil(q_len / q_block), kept)
    indices = torch.randint(-1, math.ceil(kv_len / kv_block), shape, generator=draw)
    return Selection.from_indices(
        indices, kv_len=kv_len, q_len=q_len, kv_block=kv_block, q_block=q_block
    )


def keys_of(select: Selection, b: int, heads: range, total: int, query: int) -> set[int]:
    """Keys of the candidates that query heads ``heads`` of ``total`` have for a query, all together."""
    found: set[int] = set()
    for h in heads:
        at = (b % select.indices.shape[0], h * select.heads // total, query // select.q_block)
        for c in select.indices[at].tolist():
            if c >= 0:
                first = c * select.kv_block
                found |= set(range(first, min(first + select.kv_block, select.kv_len)))
    return found


@pytest.mark.parametrize("size", [1, 7, 63, 65, 200])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rule", [None, Causal(), PER_HEAD], ids=["none", "causal", "per head"])
@pytest.mark.parametrize("own", ["shared", "kv", "query"])
def test_gather_counts_the_keys_it_reads(
    size: int, heads: tuple[int, int], rule: Any, own: str
) -> None:
    lists = {"shared": 1, "kv": heads[1], "query": heads[0]}[own]
    select = blocks(lists, size, size, 8, 16, 3)
    q, k, v = qkv(heads, size, size)
    plan = fs.make_plan(q, k, v, rule=rule, select=select, backend="gather")
    budget = plan.run(q, k, v).budget()
    group = heads[0] // heads[1]
    apart = rule is PER_HEAD or (own == "query" and group > 1)
    read = each = together = 0
    for b in range(2):
        for query in range(size):
            together += heads[1] * len(keys_of(select, b, range(heads[0]), heads[0], query))
            for g in range(heads[1]):
                mine = range(g * group, (g + 1) * group)
                each += len(keys_of(select, b, mine, heads[0], query))
                for h in mine if apart else mine[:1]:
                    read += len(keys_of(select, b, range(h, h + 1), heads[0], query))
    key_bytes = (16 + 24) * 4
    sharing = 1 if apart else group
    assert budget.counted == "keys" and budget.physical_tiles == 0
    assert budget.kv_bytes == read * key_bytes
    assert budget.physical_pairs == read * sharing
    assert budget.executed_flops == read * sharing * 2 * 40
    assert budget.kv_bytes_if.per_query_head == read * sharing * key_bytes
    assert budget.kv_bytes_if.per_kv_head == each * key_bytes
    assert budget.kv_bytes_if.shared == together * key_bytes
    seen = plan.layout(select).dense()
    assert budget.logical_pairs == int(seen.sum())
    assert budget.physical_pairs >= budget.logical_pairs
    if rule is None:
        assert budget.inflation == 1.0


@pytest.mark.parametrize("backend", ["gather", "dense"])
def test_a_tile_changes_nothing_where_none_is_visited(backend: Any) -> None:
    q, k, v = qkv((8, 2), 200, 200)
    select = blocks(2, 200, 200, 1, 16, 3)
    said = []
    for tile in (None, 16, (64, 32), 128):
        plan = fs.make_plan(q, k, v, rule=Causal(), select=select, backend=backend, tile=tile)
        lines = str(plan).splitlines()
        told = [line for line in lines if f"was asked for, but {backend} visits none" in line]
        assert len(told) == (tile is not None)
        said.append((str(plan.budget()), *[line for line in lines if line not in told]))
        assert "tiles of" not in str(plan) and "tiles of" not in repr(plan)
    assert len(set(said)) == 1
    assert reads("tiles", (64, 32)) == "tiles of 64x32"


def test_a_fallback_is_read_by_those_that_see_nothing() -> None:
    q, k, v = qkv((4, 2), 65, 65)
    select = blocks(2, 65, 65, 1, 8, 2)
    plain, near = (
        fs.make_plan(q, k, v, rule=Causal(), select=select, fallback=f, backend="gather").budget()
        for f in (None, ("local", 3))
    )
    seen = (
        fs.make_plan(q, k, v, rule=Causal(), select=select, backend="tiles").layout(select).dense()
    )
    alone = ~seen.any(-1)[:, ::2]
    added = (torch.arange(65) + 1).clamp(max=3).expand_as(alone)[alone].sum()
    assert int(added) > 0
    assert near.physical_pairs - plain.physical_pairs == 2 * int(added)
    assert near.logical_pairs - plain.logical_pairs == 2 * int(added)


@pytest.mark.parametrize("size", [1, 7, 65])
@pytest.mark.parametrize("heads", HEADS)
def test_dense_counts_the_pairs_that_torch_runs(size: int, heads: tuple[int, int]) -> None:
    q, k, v = qkv(heads, size, size)
    every = 2 * heads[0] * size * size
    half = 2 * heads[0] * size * (size + 1) // 2
    side = 2 * size * 40 * 4
    for options, pairs, copies in (
        ({}, every, heads[1]),
        ({"rule": Causal()}, half, heads[1]),
        ({"rule": Causal(), "score": Alibi(torch.ones(heads[0]))}, every, heads[1]),
        ({"rule": PER_HEAD}, every, heads[0]),
    ):
        given: dict[str, Any] = dict(options)
        plan = fs.make_plan(q, k, v, backend="dense", **given)
        budget = plan.run(q, k, v).budget()
        assert (budget.counted, budget.physical_pairs) == ("pairs", pairs), options
        assert budget.kv_bytes == copies * side
        assert budget.executed_flops == pairs * 2 * 40
        # With lse torch's kernels are of no use: all pairs are computed.
        assert plan.run(q, k, v, return_lse=True).budget().physical_pairs == every


@pytest.mark.parametrize("q_len", [1, 5, 16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("strided", [False, True])
def test_decode_counts_a_list_once_for_the_heads_that_walk_it(
    q_len: int, heads: tuple[int, int], strided: bool
) -> None:
    q, k, v = qkv(heads, q_len, 200)
    if strided:  # a cache [B, S, Hkv, D] does not fold
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    select = blocks(heads[1], q_len, 200, q_len, 16, 4)
    plan = fs.make_plan(q, k, v, select=select)
    assert plan.backend == "decode"
    result = plan.run(q, k, v)
    budget = result.budget()
    listed = int(select.counts.sum())
    assert budget.physical_tiles == listed
    assert budget.physical_pairs == listed * heads[0] // heads[1] * q_len * 16
    assert budget.kv_bytes == listed * 16 * 40 * 4
    rows = decode.rows_held(heads[0] // heads[1] * q_len, on_cuda=True)
    assert rows == max(16, 2 ** math.ceil(math.log2(heads[0] // heads[1] * q_len)))
    on_gpu = count(result.layout, Together(heads[0] // heads[1], rows))
    assert on_gpu.physical_pairs == listed * rows * 16 and on_gpu.kv_bytes == budget.kv_bytes


def test_packed_tiles_are_those_of_the_layout() -> None:
    q, k, v = qkv((8, 2), 200, 200)
    select = blocks(2, 200, 200, 1, 16, 3)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select, pack="pack", backend="tiles")
    assert plan.budget() == plan.layout(select).budget()


def test_the_label_says_of_what() -> None:
    q, k, v = qkv((2, 2), 65, 65)
    assert "% of all pairs)" in str(fs.make_plan(q, k, v, rule=Causal()).budget())


def test_few_queries_decode_on_cpu_unless_they_cannot() -> None:
    q, k, v = qkv((4, 2), 3, 65)
    plan = fs.make_plan(q, k, v, rule=Causal())
    assert plan.backend == "decode" and "few queries" in plan.reasons[0]
    for refused in (
        fs.make_plan(q, k, v, rule=Causal(), score=Alibi(torch.ones(4))),
        fs.make_plan(q, k, v, rule=Causal(), tile=16),
        fs.make_plan(q.double(), k.double(), v.double(), rule=Causal()),
        fs.make_plan(q.clone().requires_grad_(), k, v, rule=Causal()),
        fs.make_plan(*qkv((4, 2), 65, 65), rule=Causal()),
    ):
        assert refused.backend == "tiles"


@pytest.mark.parametrize("size", [1024, 1000])
@pytest.mark.parametrize(("q_block", "kv_block", "kept"), [(64, 16, 4), (64, 64, 3), (16, 16, 4)])
def test_fine_candidates_are_given_fine_tiles(
    size: int, q_block: int, kv_block: int, kept: int
) -> None:
    q, k, v = qkv((2, 2), size, size)
    select = blocks(2, size, size, q_block, kv_block, kept)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select, backend="tiles")
    assert plan.tile == (q_block, kv_block)
    coarse = fs.make_plan(q, k, v, rule=Causal(), select=select, backend="tiles", tile=128)
    assert coarse.tile == (128, 128)
    pairs = plan.budget().physical_pairs
    assert pairs < coarse.budget().physical_pairs
    assert any("times the pairs of 128x128" in why for why in plan.reasons)
    torch.testing.assert_close(plan.run(q, k, v).out, coarse.run(q, k, v).out)
    fs.check(q, k, v, rule=Causal(), select=select, backend="tiles", rows=16).raise_if_failed()


def test_a_tile_stays_where_a_smaller_one_saves_nothing() -> None:
    q, k, v = qkv((2, 2), 1024, 1024)
    for select in (blocks(2, 1024, 1024, 128, 128, 3), blocks(2, 1024, 1024, 1, 1, 8)):
        plan = fs.make_plan(q, k, v, select=select, backend="tiles")
        assert plan.tile == (128, 128)
        assert any(why.startswith("tiles of 128x128: ") for why in plan.reasons)


@pytest.mark.parametrize("per", [1, 3, 4])
@pytest.mark.parametrize("q_block", [1, 16, 64, 256])
@pytest.mark.parametrize("kv_block", [16, 48, 64, 512])
def test_no_tile_is_predicted_to_take_longer_than_the_default(
    q_block: int, kv_block: int, per: int
) -> None:
    grid, default = fs.Grid(1000, 1000), (heights(per)[-1], 128)
    select = blocks(2, 1000, 1000, q_block, kv_block, 4, batch=1)
    found = best_stepped(select, grid, (2 * per, 2), default, per)
    assert not found.size[0] % per
    in_queries = [(rows // per, keys) for rows, keys in (default, found.size)]
    whole, met = tiles_met(select, grid, (2 * per, 2), in_queries)
    assert stepped(met, found.size) <= stepped(whole, default)
    ratio = met.tiles * math.prod(found.size) / (whole.tiles * math.prod(default))
    assert ratio <= 1
    if found.other is None:
        assert found.pairs == pytest.approx(ratio)


def test_rows_of_several_heads_have_the_tile_of_their_blocks_on_cpu() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 1024, 16, generator=draw) for h in (8, 2, 2))
    ids = torch.randint(-1, 64, (1, 2, 64, 8), generator=draw)
    options = {
        "rule": Causal(),
        "select": Selection.from_indices(ids, kv_len=1024, q_len=1024, kv_block=16, q_block=16),
    }
    plan = fs.make_plan(q, k, v, **options)
    assert plan.tile == (64, 16) and plan.budget().inflation < 1.2
    assert "times the pairs of 128x128" in str(plan)
    fs.check(q, k, v, **options).raise_if_failed()
