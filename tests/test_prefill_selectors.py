"""Published selectors for prefill, held against their definitions, head by head and row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import prefill_definitions as defined
import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.selectors import (
    AShapeBlocks,
    BlockSparse,
    FlexPrefill,
    MInference,
    VerticalSlashBlocks,
    XAttention,
)

LENGTHS = [
    (1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (200, 200), (1, 200), (7, 65), (65, 200), (65, 20)
]  # fmt: skip
KINDS = ["random", "tied", "constant", "adversarial"]
BATCH, HEADS, DIM = 2, (4, 2), 4


def inputs(kind: str, q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """In fp64, so that only equal scores are equal."""
    draw = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    q = torch.randn(BATCH, HEADS[0], q_len, DIM, generator=draw, dtype=torch.float64)
    k = torch.randn(BATCH, HEADS[1], kv_len, DIM, generator=draw, dtype=torch.float64)
    if kind == "tied":
        return q.sign(), k.sign()
    if kind == "constant":
        return torch.ones_like(q), torch.ones_like(k)
    if kind == "adversarial":
        # Keys that cancel within a block, one that outweighs all, and queries that point away.
        k[:, :, 1::2] = -k[:, :, 0 : kv_len - kv_len % 2 : 2]
        k[:, :, kv_len // 2] = 9.0
        q[:, :, ::3] = -3.0
    return q, k


class Head(NamedTuple):
    b: int
    h: int
    q: Tensor
    k: Tensor


def heads_of(q: Tensor, k: Tensor) -> Iterator[Head]:
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            yield Head(b, h, q[b, h], k[b, h * k.shape[1] // q.shape[1]])


def rows_of(selection: fs.Selection, head: Head) -> list[set[int]]:
    lists = selection.indices[
        head.b % len(selection.indices), head.h * selection.heads // HEADS[0]
    ].tolist()
    return [{c for c in row if c >= 0} for row in lists]


def agree(got: set[int], want: set[int], score: Any) -> bool:
    """The same set, or one that differs in equals only."""
    if got == want:
        return True
    mine, true = (sorted(score[c] for c in x) for x in (got, want))
    return len(mine) == len(true) and all(
        math.isclose(a, b, abs_tol=1e-9) for a, b in zip(mine, true, strict=True)
    )


def marked(table: Tensor) -> set[int]:
    return set(table.nonzero()[:, 0].tolist())


def causal(at: int) -> Any:
    return lambda i, j: j <= at + i


def seen_by(rule: Any, at: int) -> Any:
    return causal(at) if rule is not None else lambda i, j: True


# XAttention


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rule", "forced"), [(Causal(), (1, 1)), (None, (0, 0))], ids=["causal", "full"]
)
def test_xattention(
    rule: Any, forced: tuple[int, int], kind: str, lengths: tuple[int, int]
) -> None:
    q, k = inputs(kind, *lengths)
    at = lengths[1] - lengths[0]
    tau = torch.tensor([0.37, 0.617, 0.83, 0.97], dtype=torch.float64)
    selector = XAttention(block=16, q_block=8, stride=4, tau=tau, first=forced[0], last=forced[1])
    chosen = selector.select(q, k, fs.Grid(*lengths, batch=BATCH), rule)
    assert chosen.heads == HEADS[0]
    rows, columns = defined.blocks(lengths[0], 8), defined.blocks(lengths[1], 16)
    seen = seen_by(rule, at)
    reach = defined.touched(seen, rows, columns)
    own = [(at + row[-1]) // 16 for row in rows]
    always = [
        set(range(min(forced[0], len(columns)))) | set(range(own[r] + 1 - forced[1], own[r] + 1))
        for r in range(len(rows))
    ]
    for head in heads_of(q, k):
        mass = defined.antidiagonal_mass(head.q, head.k, 4, seen, rows, columns)
        for r, got in enumerate(rows_of(chosen, head)):
            want = defined.cover(mass[r], float(tau[head.h]), always[r] & reach[r])
            assert got <= reach[r]
            assert agree(got, want, mass[r]), (head.b, head.h, r)
            assert got or not reach[r]


def test_xattention_keeps_the_block_that_crosses_and_no_more() -> None:
    """Four equal blocks: half of the mass is two of them, a hair more is three."""
    q = k = torch.zeros(1, 1, 64, DIM)
    for tau, blocks in ((0.5, [0, 1]), (0.5001, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        selector = XAttention(block=16, q_block=64, stride=4, tau=tau, first=0, last=0)
        assert (
            selector.select(q, k, fs.Grid(64, 64)).indices[0, 0, 0].tolist()[: len(blocks)]
            == blocks
        )
        assert selector.select(q, k, fs.Grid(64, 64)).counts.item() == len(blocks)


def test_xattention_of_fixed_blocks_that_hold_enough_keeps_only_these() -> None:
    q = k = torch.zeros(1, 1, 64, DIM)
    selector = XAttention(block=16, q_block=16, stride=4, tau=0.01)
    chosen = selector.select(q, k, fs.Grid(64, 64), Causal())
    assert [sorted(set(x) - {-1}) for x in chosen.indices[0, 0].tolist()] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 3],
    ]


def test_xattention_in_chunks_is_xattention_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = inputs("random", 65, 200)
    selector, grid = XAttention(block=16, q_block=16, stride=4), fs.Grid(65, 200, batch=BATCH)
    whole = selector.weigh(q, k, grid, Causal())
    monkeypatch.setattr("flexsparse.selectors.xattention._AT_ONCE", 1)
    torch.testing.assert_close(selector.weigh(q, k, grid, Causal()), whole)


# A-shape, vertical-slash, block-sparse


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (16, 16), (8, 32), (32, 8)], ids=str)
def test_a_shape(sizes: tuple[int, int], lengths: tuple[int, int]) -> None:
    q, k = inputs("random", *lengths)
    at = lengths[1] - lengths[0]
    sink, window = torch.tensor([0, 1, 5, 40]), torch.tensor([1, 9, 16, 17])
    selector = AShapeBlocks(q_block=sizes[0], block=sizes[1], sink=sink, window=window)
    chosen = selector.select(q, k, fs.Grid(*lengths, batch=BATCH), None)
    assert len(chosen.indices) == 1
    rows, columns = (defined.blocks(n, size) for n, size in zip(lengths, sizes, strict=True))
    for head in heads_of(q[:1], k[:1]):

        def pairs(i: int, j: int, h: int = head.h) -> bool:
            near = at + i - j < int(window[h])
            return j <= at + i and (j < int(sink[h]) or near)

        assert rows_of(chosen, head) == defined.touched(pairs, rows, columns)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_vertical_slash_finds_the_columns_and_diagonals(
    kind: str, lengths: tuple[int, int]
) -> None:
    q, k = inputs(kind, *lengths)
    at, kv_len = lengths[1] - lengths[0], lengths[1]
    vertical, slash = torch.tensor([0, 4, 6, 300]), torch.tensor([1, 3, 8, 20])
    selector = VerticalSlashBlocks(vertical=vertical, slash=slash, sample=20, first=2, near=3)
    columns, distances = selector.found(q, k, fs.Grid(*lengths, batch=BATCH), Causal())
    for head in heads_of(q, k):
        weights = defined.sampled(head.q, head.k, 20, causal(at), at)
        for got, mass, count, always in (
            (columns, defined.column_sums(weights, kv_len), vertical, 2),
            (distances, defined.diagonal_sums(weights, kv_len, at), slash, 3),
        ):
            order = defined.falling(mass, range(min(always, kv_len)))
            want = set(order[: max(int(count[head.h]), always)])
            assert agree(marked(got[head.b, head.h]), want, mass)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (16, 16), (8, 32), (32, 8)], ids=str)
def test_vertical_slash_keeps_the_blocks_that_they_touch(
    sizes: tuple[int, int], lengths: tuple[int, int]
) -> None:
    """In blocks of one they are the pattern itself, pair by pair, and so is the exact rule."""
    q, k = inputs("random", *lengths)
    at, grid = lengths[1] - lengths[0], fs.Grid(*lengths, batch=BATCH)
    selector = VerticalSlashBlocks(
        q_block=sizes[0], block=sizes[1], vertical=4, slash=5, sample=20, first=1, near=2
    )
    columns, distances = selector.found(q, k, grid, None)
    chosen = selector.select(q, k, grid, None)
    exact = selector.exact(q, k, grid)
    rows, blocks = (defined.blocks(n, size) for n, size in zip(lengths, sizes, strict=True))
    for head in heads_of(q, k):
        lines = marked(columns[head.b, head.h]), marked(distances[head.b, head.h])

        def pairs(i: int, j: int, lines: tuple[set[int], set[int]] = lines) -> bool:
            return j <= at + i and (j in lines[0] or at + i - j in lines[1])

        assert rows_of(chosen, head) == defined.touched(pairs, rows, blocks)
        b, h = torch.tensor(head.b), torch.tensor(head.h)
        position = torch.arange(at, lengths[1])[:, None]
        table = exact(b, h, position, torch.arange(lengths[1]))
        wanted = [[pairs(i, j) for j in range(lengths[1])] for i in range(lengths[0])]
        assert table.tolist() == wanted


def test_the_exact_rule_in_blocks_is_the_pattern_in_attention() -> None:
    """Blocks that a tile kernel can use, and the rule that leaves exactly the pattern's pairs in them."""
    q, k = (x.float() for x in inputs("random", 65, 65))
    grid = fs.Grid(65, 65, batch=BATCH)
    coarse = VerticalSlashBlocks(block=16, q_block=16, vertical=3, slash=3, first=1, near=1)
    fine = VerticalSlashBlocks(block=1, q_block=1, vertical=3, slash=3, first=1, near=1)
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(3))
    got = fs.attention(q, k, v, select=coarse, rule=coarse.exact(q, k, grid), tile=16)
    want = fs.reference(q, k, v, select=fine.select(q, k, grid)).out
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_block_sparse(kind: str, lengths: tuple[int, int]) -> None:
    q, k = inputs(kind, *lengths)
    chosen = BlockSparse(block=16, q_block=8, keep=3).select(
        q, k, fs.Grid(*lengths, batch=BATCH), Causal()
    )
    rows, columns = defined.blocks(lengths[0], 8), defined.blocks(lengths[1], 16)
    reach = defined.touched(causal(lengths[1] - lengths[0]), rows, columns)
    for head in heads_of(q, k):
        scores = defined.products(defined.means(head.q, 8), defined.means(head.k, 16))
        for r, got in enumerate(rows_of(chosen, head)):
            order = [c for c in defined.falling(scores[r]) if c in reach[r]]
            assert agree(got, set(order[:3]), scores[r])


# The choice by head


def patterns(q_block: int = 8, block: int = 16) -> tuple[fs.Selector, ...]:
    sizes = {"q_block": q_block, "block": block}
    return (
        VerticalSlashBlocks(vertical=3, slash=2, sample=16, first=1, near=1, **sizes),
        AShapeBlocks(sink=4, window=20, **sizes),
        BlockSparse(keep=2, **sizes),
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("table", [[0, 1, 2, 0], [2, 2, 2, 2], None])
def test_minference_gives_each_head_its_pattern(table: Any, lengths: tuple[int, int]) -> None:
    q, k = inputs("random", *lengths)
    grid = fs.Grid(*lengths, batch=BATCH)
    pattern_of = None if table is None else torch.tensor(table)
    mixed = MInference(patterns=patterns(), pattern_of=pattern_of).select(q, k, grid, Causal())
    assert (mixed.q_block, mixed.kv_block) == (8, 16)
    each = [p.select(q, k, grid, Causal()) for p in patterns()]
    for head in heads_of(q, k):
        own = each[([0, 1, 2, 0] if table is None else table)[head.h]]
        assert rows_of(mixed, head) == rows_of(own, head)


@pytest.mark.parametrize("budget", [1.0, 0.6, 0.3, 1e-9])
@pytest.mark.parametrize("lengths", [(65, 65), (7, 65), (1, 1)], ids=str)
def test_minference_searches_by_recall_at_equal_cost(
    lengths: tuple[int, int], budget: float
) -> None:
    q, k = inputs("random", *lengths)
    at, grid = lengths[1] - lengths[0], fs.Grid(*lengths, batch=BATCH)
    candidates = (*patterns(), AShapeBlocks(q_block=8, block=16, sink=1, window=1))
    found = MInference.searched(candidates, q, k, grid, Causal(), budget=budget)
    each = [p.select(q, k, grid, Causal()) for p in candidates]
    visible = sum(min(at + i + 1, lengths[1]) for i in range(lengths[0])) * BATCH
    for h in range(HEADS[0]):
        recall, cost = [0.0] * len(each), [0.0] * len(each)
        for head in heads_of(q, k):
            if head.h != h:
                continue
            weights = defined.sampled(head.q, head.k, lengths[0], causal(at), at)
            for p, selection in enumerate(each):
                for i, row in weights.items():
                    blocks = rows_of(selection, head)[i // 8]
                    inside = [j for j in range(lengths[1]) if j // 16 in blocks and j <= at + i]
                    recall[p] += math.fsum(row[j] for j in inside)
                    cost[p] += len(inside) / visible
        fits = [p for p in range(len(each)) if cost[p] <= budget]
        best = max(fits, key=lambda p: round(recall[p], 9)) if fits else cost.index(min(cost))
        assert found.pattern_of is not None
        assert int(found.pattern_of[h]) == best, (recall, cost)


def test_minference_recognises_what_a_head_was_made_of() -> None:
    """A head of neighbours, one of three columns, one of three clusters."""
    size = 64
    one_hot = torch.eye(size, dtype=torch.float64)
    q, k = torch.zeros(1, 3, size, size).double(), torch.zeros(1, 3, size, size).double()
    q[:, 0] = k[:, 0] = 40 * one_hot
    k[:, 1, [5, 21, 37]] = 40.0
    q[:, 1] = 1.0
    cluster = torch.arange(size) // 8 % 3
    q[:, 2, torch.arange(size), cluster] = k[:, 2, torch.arange(size), cluster] = 40.0
    sizes = {"q_block": 8, "block": 8}
    given = (
        AShapeBlocks(sink=1, window=1, **sizes),
        VerticalSlashBlocks(vertical=3, slash=0, first=0, near=0, sample=16, **sizes),
        BlockSparse(keep=2, **sizes),
    )
    found = MInference.searched(given, q, k, fs.Grid(size, size), Causal())
    assert found.pattern_of is not None and found.pattern_of.tolist() == [0, 1, 2]


# FlexPrefill


def flex_prefill(
    head: Head, at: int, rows: list[range], columns: list[range], **given: Any
) -> tuple[list[set[int]], bool]:
    """The candidates of one head, and whether it is query-aware."""
    block, kv_len = given["block"], len(head.k)
    weights = defined.sampled(head.q, head.k, block, causal(at), at)
    keys = defined.column_sums(weights, kv_len)
    distances = defined.diagonal_sums(weights, kv_len, at)
    total = math.fsum(keys) or 1.0
    keys, distances = [x / total for x in keys], [x / total for x in distances]
    sums = [[math.fsum(x[j] for j in b) for b in columns] for x in (keys, distances)]
    last = head.q.double()[-block:].mean(0, keepdim=True)
    kbar = defined.means(head.k, block)
    visible = [any(j <= at + i for i in weights for j in b) for b in columns]
    estimate = defined.softmax(defined.products(last, kbar)[0], visible)
    aware = defined.divergence(estimate, sums[0]) < given["tau"]
    least = min(math.ceil(given["min_budget"] / block), len(columns))
    most = given["max_budget"]
    most = len(columns) if most is None else min(math.ceil(most / block), len(columns))
    lines = []
    for fine, coarse in zip((keys, distances), sums, strict=True):
        if given["counted"] == "tokens":
            count = len(defined.cover(fine, given["gamma"])) // block + 1
        else:
            count = len(defined.cover(coarse, given["gamma"]))
        count = min(max(least if aware else count, least), most)
        lines.append(set(defined.falling(coarse, [0])[:count]))
    own = [(at + row[-1]) // block for row in rows]
    chosen = [
        {
            c
            for c in range(len(columns))
            if c <= own[r] and (c in lines[0] or own[r] - c in lines[1])
        }
        for r in range(len(rows))
    ]
    if aware:
        scores = defined.products(defined.means(head.q, len(rows[0])), kbar)
        flat: list[float] = []
        for r in range(len(rows)):
            flat += defined.softmax(scores[r], [c <= own[r] for c in range(len(columns))])
        cover = defined.cover if given["crossing"] == "kept" else defined.below
        for place in cover(flat, given["gamma"]):
            r, c = divmod(place, len(columns))
            if c <= own[r]:
                chosen[r].add(c)
    return chosen, aware


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "given",
    [
        {"tau": 0.0, "min_budget": 16, "max_budget": None, "counted": "tokens", "crossing": "kept"},
        {"tau": 0.3, "min_budget": 1, "max_budget": 50, "counted": "blocks", "crossing": "kept"},
        {
            "tau": 1.0,
            "min_budget": 20,
            "max_budget": None,
            "counted": "blocks",
            "crossing": "dropped",
        },
    ],
    ids=["vertical-slash", "mixed", "query-aware"],
)
def test_flex_prefill(given: dict[str, Any], kind: str, lengths: tuple[int, int]) -> None:
    q, k = inputs(kind, *lengths)
    at, grid = lengths[1] - lengths[0], fs.Grid(*lengths, batch=BATCH)
    options = {"block": 16, "gamma": 0.837, **given}
    selector = FlexPrefill(q_block=8, **options)
    chosen = selector.select(q, k, grid, Causal())
    query_aware = selector.estimate(q, k, grid, Causal()).query_aware
    rows, columns = defined.blocks(lengths[0], 8), defined.blocks(lengths[1], 16)
    reach = defined.touched(causal(at), rows, columns)
    for head in heads_of(q, k):
        want, aware = flex_prefill(head, at, rows, columns, **options)
        assert bool(query_aware[head.b, head.h]) == aware
        got = rows_of(chosen, head)
        assert got == [w & r for w, r in zip(want, reach, strict=True)], (head.b, head.h)
        assert all(g or not r for g, r in zip(got, reach, strict=True))


def test_flex_prefill_meets_both_kinds_of_head() -> None:
    """The data of the mixed case holds both in one call."""
    q, k = inputs("adversarial", 200, 200)
    grid = fs.Grid(200, 200, batch=BATCH)
    aware = FlexPrefill(block=16, q_block=8, tau=0.3).estimate(q, k, grid, None).query_aware
    assert bool(aware.any()) and not bool(aware.all())


# What all of them share


EVERY: dict[str, Any] = {
    "xattention": lambda **o: XAttention(block=16, q_block=8, stride=4, tau=0.6, **o),
    "a_shape": lambda **o: AShapeBlocks(block=16, q_block=8, sink=torch.tensor([1, 40, 0, 60]), window=9, **o),
    "vertical_slash": lambda **o: VerticalSlashBlocks(
        block=16, q_block=8, vertical=2, slash=2, first=1, near=1, **o
    ),
    "block_sparse": lambda **o: BlockSparse(block=16, q_block=8, keep=2, **o),
    "minference": lambda **o: MInference(patterns=patterns(), **o),
    "flex_prefill": lambda **o: FlexPrefill(
        block=16, q_block=8, gamma=0.4, min_budget=1, tau=0.3, counted="blocks", **o
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("heads", "lists"), [("query", 4), ("kv", 2), ("shared", 1)])
def test_heads_that_share_a_list_get_what_any_of_them_chose(
    heads: str, lists: int, name: str
) -> None:
    q, k = inputs("random", 65, 200)
    grid = fs.Grid(65, 200, batch=BATCH)
    alone = EVERY[name]().select(q, k, grid, Causal())
    joined = EVERY[name](heads=heads).select(q, k, grid, Causal())
    assert joined.heads == lists
    each = {(x.b, x.h): rows_of(alone, x) for x in heads_of(q, k)}
    for head in heads_of(q, k):
        group = [h for h in range(4) if h * lists // 4 == head.h * lists // 4]
        want = [set().union(*(each[head.b, h][r] for h in group)) for r in range(joined.rows)]
        assert rows_of(joined, head) == want
    if heads == "shared":
        assert any(each[0, 0] != each[0, h] for h in range(1, 4))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_no_query_that_sees_a_key_is_left_without_one(lengths: tuple[int, int], name: str) -> None:
    """Where a method always keeps the own block; those that need not are free to skip a query."""
    q, k = inputs("adversarial", *lengths)
    chosen = EVERY[name]().select(q, k, fs.Grid(*lengths, batch=BATCH), Causal())
    at = lengths[1] - lengths[0]
    allowed = torch.arange(lengths[1]) <= torch.arange(at, lengths[1])[:, None]
    some = (chosen.dense() & allowed).any(-1)
    if name in ("block_sparse", "minference"):
        some = chosen.counts > 0
        allowed = torch.stack([x.any(0) for x in allowed.split(8)])
    assert torch.equal(some, allowed.any(-1).expand_as(some))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lengths", [(65, 65), (7, 200), (65, 20)], ids=str)
def test_attention_over_what_is_chosen(lengths: tuple[int, int], name: str) -> None:
    q, k = (x.float() for x in inputs("random", *lengths))
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(5))
    report = fs.check(q, k, v, rule=Causal(), select=EVERY[name](), tile=16, grads=True)
    assert report.ok, report.table()


@pytest.mark.parametrize("name", EVERY)
def test_each_sequence_stands_where_it_stands(name: str) -> None:
    """Offsets of each sequence's own give what each gives alone."""
    q, k = inputs("random", 7, 65)
    offsets = torch.tensor([58, 20])
    both = EVERY[name]().select(q, k, fs.Grid(7, 65, q_offset=offsets, batch=2), Causal())
    for b in range(2):
        grid = fs.Grid(7, 65, q_offset=int(offsets[b]))
        alone = EVERY[name]().select(q[b : b + 1], k[b : b + 1], grid, Causal())
        mine = [rows_of(both, Head(b, h, q, k)) for h in range(4)]
        assert mine == [rows_of(alone, Head(0, h, q, k)) for h in range(4)]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_in_single(dtype: torch.dtype, name: str) -> None:
    q, k = (x.to(dtype) for x in inputs("random", 65, 65))
    grid = fs.Grid(65, 65, batch=BATCH)
    half = EVERY[name]().select(q, k, grid, Causal())
    single = EVERY[name]().select(q.float(), k.float(), grid, Causal())
    assert torch.equal(half.indices, single.indices)


def wrong() -> Iterable[tuple[Any, str]]:
    yield lambda: XAttention(block=20, stride=8), "block must be a multiple of stride, got 20 and 8"
    yield lambda: XAttention(tau=0), "tau must be above 0 and at most 1, got 0"
    yield lambda: XAttention(tau=torch.tensor([0.5, 1.5])), "tau must be above 0 .*1.5"
    yield lambda: XAttention(heads="all"), "heads must be"
    yield lambda: AShapeBlocks(window=0), "window must be at least 1"
    yield lambda: VerticalSlashBlocks(slash=torch.tensor([-1, 2])), "slash must be at least 0"
    yield lambda: VerticalSlashBlocks(sample=0), "sample must be at least 1"
    yield lambda: MInference(patterns=()), "tuple of selectors"
    yield lambda: MInference(patterns=(3,)), "must be selectors, got 3"
    yield (
        lambda: MInference(patterns=(BlockSparse(), BlockSparse(block=32))),
        "same .q_block, block.",
    )
    yield lambda: MInference(pattern_of=torch.tensor([0, 3])), "0..2, got 3"
    yield lambda: FlexPrefill(gamma=1.1), "gamma must be above 0"
    yield lambda: FlexPrefill(counted="keys"), "counted must be 'tokens' or 'blocks'"
    yield lambda: FlexPrefill(max_budget=100), "max_budget must be at least 512"


@pytest.mark.parametrize(("make", "said"), list(wrong()))
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(fs.FlexSparseError, match=said):
        make()


@pytest.mark.parametrize(
    "selector",
    [
        XAttention(tau=torch.tensor([0.5, 0.6])),
        AShapeBlocks(sink=torch.tensor([1, 2, 3])),
        VerticalSlashBlocks(slash=torch.tensor([1])),
        MInference(pattern_of=torch.tensor([0, 1])),
    ],
    ids=lambda s: type(s).__name__,
)
def test_a_table_of_another_number_of_heads_is_refused(selector: fs.Selector) -> None:
    q, k = inputs("random", 7, 7)
    with pytest.raises(fs.FlexSparseError, match="one entry for each of the 4 query heads"):
        selector.select(q, k, fs.Grid(7, 7, batch=BATCH), Causal())


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_every_device_chooses_the_same(name: str) -> None:
    q, k = inputs("random", 65, 200)
    grid = fs.Grid(65, 200, batch=BATCH)
    here = EVERY[name]().select(q, k, grid, Causal())
    there = EVERY[name]().select(q.cuda(), k.cuda(), grid, Causal())
    assert torch.equal(there.indices.cpu(), here.indices)
