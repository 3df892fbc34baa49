"""Rows laid beside those that select alike: fewer tiles, the same results, and when it is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ways import weigh
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.ordering import alike, codes_in_order, in_order
from flexsparse.reference import allowed

LENGTH = 256


def clustered(
    seed: int = 0, heads: int = 2, length: int = LENGTH, q_block: int = 1, clusters: int = 8
) -> fs.Selection:
    """Each row of candidates is that of its cluster, two blocks of 16; clusters are strewn about."""
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.arange(length // 16)[torch.randperm(length // 16, generator=draw)].view(-1, 2)
    rows = -(-length // q_block)
    cluster = torch.randint(0, min(clusters, len(blocks)), (1, heads, rows), generator=draw)
    return fs.Selection.from_indices(
        blocks[cluster], kv_len=length, q_len=length, q_block=q_block, kv_block=16
    )


def inputs(grads: bool = False, length: int = LENGTH) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(1, heads, length, 16) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=draw).requires_grad_(grads) for shape in shapes]


OPTIONS: dict[str, Any] = {"backend": "tiles", "tile": (32, 16), "pack": "fold"}


def visited(plan: fs.Plan) -> int:
    assert plan.first is not None
    return int((plan.first.kv_num_blocks + plan.first.full_kv_num_blocks).sum())


def same(result: Any, qkv: list[Tensor], select: fs.Selection, rule: Any = None) -> None:
    true = fs.reference(*qkv, rule=rule, select=select)
    torch.testing.assert_close(result.out, true.out.to(result.out.dtype), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.lse, true.lse.to(result.lse.dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", [None, Causal()], ids=["any", "causal"])
def test_rows_of_a_cluster_share_their_tiles(rule: Any) -> None:
    qkv, select = inputs(), clustered()
    strewn, laid = (
        fs.make_plan(*qkv, rule=rule, select=select, cluster=own, **OPTIONS)
        for own in (False, True)
    )
    assert visited(laid) * (3 if rule is None else 2) <= visited(strewn)
    same(laid.run(*qkv, return_lse=True), qkv, select, rule)
    assert strewn.first is not None and laid.first is not None
    assert strewn.first.budget().logical_pairs == laid.first.budget().logical_pairs


def test_a_layout_in_order_amounts_to_rule_and_selection() -> None:
    qkv, select = inputs(), clustered(3)
    layout = fs.make_plan(*qkv, rule=Causal(), select=select, cluster=True, **OPTIONS).first
    assert layout is not None
    rows = torch.tensor([0, 5, 100, 255])
    grid = fs.Grid(LENGTH, LENGTH)
    true = allowed(grid, 4, rule=Causal(), select=select, rows=rows)
    assert torch.equal(layout.dense(rows), true)


def test_what_a_rule_makes_of_tiles_in_order() -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 3, (1, 2, 7, 5), generator=draw, dtype=torch.int8)
    rows = torch.stack([torch.randperm(7, generator=draw) for _ in range(8)]).view(2, 4, 7)
    found = codes_in_order(codes, rows, 3)
    assert found.shape == (2, 4, 3, 5) and found.dtype == torch.int8
    for b in range(2):
        for h in range(4):
            for tile in range(3):
                held = codes[0, h // 2][rows[b, h, 3 * tile : 3 * tile + 3]]
                for column in range(5):
                    kinds = set(held[:, column].tolist())
                    assert int(found[b, h, tile, column]) == (kinds.pop() if len(kinds) == 1 else 1)


@pytest.mark.parametrize("q_block", [1, 9, 16])
def test_an_order_holds_every_row_once(q_block: int) -> None:
    select = clustered(length=224, q_block=q_block)
    rows = alike(select)
    assert torch.equal(rows.sort(-1).values, torch.arange(select.rows).expand_as(rows))
    if 224 % q_block:
        assert bool((rows[..., -1] == select.rows - 1).all()), "the short row stays the last"
    laid = in_order(select, rows).indices
    changes = (laid.diff(dim=2) != 0).any(-1).sum(-1)
    assert int(changes.max()) <= 8, "each cluster stands together"


def test_orders_are_written_in_place() -> None:
    qkv, first, second = inputs(), clustered(0), clustered(7)
    plan = fs.make_plan(*qkv, rule=Causal(), select=first, cluster=True, split=2, **OPTIONS)
    layout = plan.layout(first)
    assert layout.order is not None
    place = layout.order.place.data_ptr()
    assert plan.layout(second, into=layout) is layout and layout.order.place.data_ptr() == place
    same(plan.run(*qkv, layout, return_lse=True), qkv, second, Causal())
    plan.layout(first, into=layout, rows=range(LENGTH))
    same(plan.run(*qkv, layout, return_lse=True), qkv, first, Causal())


def test_inside_compiled_code() -> None:
    qkv = inputs(grads=True)
    plan = fs.make_plan(*qkv, select=clustered(), cluster=True, **OPTIONS)

    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        chosen = fs.Selection.from_indices(
            indices, kv_len=LENGTH, q_len=LENGTH, kv_block=16, out_of_range="drop"
        )
        return plan.run(q, k, v, plan.layout(chosen)).out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    indices = clustered(5).indices
    got, plain = compiled(*qkv, indices), step(*qkv, indices)
    torch.testing.assert_close(got, plain)
    weight = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(x, qkv, weight) for x in (got, plain)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fallback": "self"}, "ask single queries"),
        ({"empty": "error"}, "ask single queries"),
        ({"sanitize": True}, "ask single queries"),
        ({"tile": (40, 16), "select": clustered(q_block=16)}, "give tile= of twice 16 rows"),
        ({"backend": "gather"}, "takes rows only as they are"),
        ({"cluster": 3}, "cluster must be None"),
        ({"select": None}, "rows of candidates"),
    ],
)
def test_who_cannot_lay_rows_in_order_says_so(options: dict[str, Any], said: str) -> None:
    call: dict[str, Any] = {"select": clustered(), "cluster": True} | OPTIONS | options
    with pytest.raises(fs.FlexSparseError, match=said):
        fs.attention(*inputs(), **call)


@pytest.mark.parametrize("pack", ["identity", "fold", "pack"])
@pytest.mark.parametrize("q_block", [1, 7, 64, 300])
def test_a_tile_that_nobody_asked_for_holds_several_rows(pack: Any, q_block: int) -> None:
    q, k, v = inputs(length=640)
    options = {"rule": Causal(), "select": clustered(length=640, q_block=q_block)}
    plan = fs.make_plan(q, k, v, cluster=True, pack=pack, **options)
    rows = plan.tile[0] // plan.address.rows_per_query
    assert rows > q_block and not rows % q_block
    fs.check(q, k, v, cluster=True, pack=pack, **options).raise_if_failed()


def test_no_chunk_is_cut_from_an_order() -> None:
    plan = fs.make_plan(*inputs(), select=clustered(), cluster=True, **OPTIONS)
    assert "select alike" in str(plan)
    with pytest.raises(fs.FlexSparseError, match="order of its own"):
        plan.chunk(0, 64)


@pytest.mark.parametrize("strewn", [True, False])
def test_clusters_are_laid_together_where_they_are_strewn(
    strewn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the counts of both and what one H200 was measured to reach."""
    draw = torch.Generator().manual_seed(0)
    blocks = torch.stack([torch.randperm(64, generator=draw)[:8] for _ in range(16)])
    cluster = torch.randint(0, 16, (1, 4, 4096), generator=draw)
    cluster = cluster if strewn else cluster.sort(-1).values
    best = weigh(
        monkeypatch, (16, 4), (4096, 4096), indices=blocks[cluster], blocks=(1, 64), has_flash=False
    )[0]  # fmt: skip
    assert best.ordered == strewn
    assert ("alike rows together" in str(best)) == strewn
    asked = weigh(
        monkeypatch, (16, 4), (4096, 4096), indices=blocks[cluster], blocks=(1, 64), cluster=not strewn
    )  # fmt: skip
    assert asked and all(way.ordered != strewn for way in asked)
