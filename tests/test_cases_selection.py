"""What users of top-k attention met elsewhere, held as promises: lists, repeats, padding, budgets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import close, dense
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import flexsparse as fs
from flexsparse.masks import Causal, RightPadding
from flexsparse.selectors import OracleTopK, Quest, Random

HUGE = 2147480000


def tensors(
    q_len: int, kv_len: int, *, batch: int = 1, heads: tuple[int, int] = (2, 2), dim: int = 32
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    q = torch.randn(batch, heads[0], q_len, dim, generator=draw)
    return [q] + [torch.randn(batch, heads[1], kv_len, dim, generator=draw) for _ in range(2)]


def matches(inputs: list[Tensor], seen: Tensor, **options: Any) -> None:
    """out, lse and the gradients of q, k and v are those of dense attention over ``seen``."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = fs.attention(*leaves, return_lse=True, **options)
    want, want_lse = dense(*leaves, seen)
    close(out, want)
    close(lse, want_lse)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for got, true in zip(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((want * weight).sum(), leaves),
        strict=True,
    ):
        close(got, true, atol=2e-5)


Lists = list[list[int]]


def by_hand(lists: Lists, blocks: tuple[int, int], q_len: int, kv_len: int) -> Tensor:
    """bool ``[q_len, kv_len]`` of one list a row of queries; anything outside the keys is nothing."""
    seen = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for row, candidates in enumerate(lists):
        for c in candidates:
            if c >= 0:
                here = slice(row * blocks[0], (row + 1) * blocks[0])
                seen[here, c * blocks[1] : (c + 1) * blocks[1]] = True
    return seen


def selected(
    lists: Any, blocks: tuple[int, int], q_len: int, kv_len: int, **options: Any
) -> fs.Selection:
    """Lists ``[B, H, R, K]``, or ``[R, K]`` for all batches and heads, as a Selection."""
    indices = torch.as_tensor(lists)
    indices = indices if indices.ndim == 4 else indices[None, None]
    return fs.Selection.from_indices(
        indices, kv_len=kv_len, q_len=q_len, q_block=blocks[0], kv_block=blocks[1], **options
    )


# Order, padding and emptiness


ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "rising": lambda row: row,
    "falling": lambda row: row[::-1],
    "padding-first": lambda row: [-1] * 16 + row,
    "padding-between": lambda row: [x for c in row for x in (-1, c, -1)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_a_row_whose_first_picks_are_invalid_is_not_poisoned(tile: int, order: str) -> None:
    """B01. A first chunk without a single valid key left NaN in the running maximum for good."""
    inputs = tensors(256, 256)
    key, row = torch.arange(256)[None, :], torch.arange(256)[:, None]

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        late = (kv >= 70) & (kv < 90) & (q >= 100) & (q < 140)
        return ((kv == 5) | late) & ~((q >= 200) & (q < 210))

    late = (key >= 70) & (key < 90) & (row >= 100) & (row < 140)
    seen = ((key == 5) | late) & ~((row >= 200) & (row < 210))
    selection = selected([ORDERS[order]([0, 1, 2, 3])] * 4, (64, 64), 256, 256)
    matches(inputs, seen, rule=rule, select=selection, tile=tile)


@pytest.mark.parametrize("q_len", [1, 7, 63, 64, 65])
@pytest.mark.parametrize("first", [1, 15, 16, 64, 199])
def test_valid_keys_may_follow_any_number_of_hidden_ones(first: int, q_len: int) -> None:
    """B01. The running maximum survives fully hidden tiles before, between and after."""
    inputs = tensors(q_len, 200)
    key = torch.arange(200)
    seen = ((key == first) | (key == 199)).expand(q_len, -1)
    every = torch.arange(200).flip(0).expand(1, 1, q_len, -1)
    selection = selected(every, (1, 1), q_len, 200)
    rule = fs.MaskRule.of(lambda b, h, q, kv: (kv == first) | (kv == 199))
    matches(inputs, seen, rule=rule, select=selection, tile=16)
    matches(inputs, seen, rule=rule, tile=16)


def test_a_compiled_row_whose_first_tiles_are_hidden_is_not_poisoned() -> None:
    """B01, in the fused kernel."""
    inputs = tensors(256, 256)
    key, row = torch.arange(256)[None, :], torch.arange(256)[:, None]
    seen = ((key == 5) | ((key >= 200) & (row < 100))) & (row < 210)
    rule = fs.MaskRule.of(lambda b, h, q, kv: ((kv == 5) | ((kv >= 200) & (q < 100))) & (q < 210))
    selection = selected([[3, 2, 1, 0]] * 4, (64, 64), 256, 256)
    close(
        fs.attention(*inputs, rule=rule, select=selection, tile=64, backend="flex"),
        dense(*inputs, seen)[0],
    )


HEAD_LISTS = [[0, 7], [3], [], [1, 2, 4, 6, 7]]


def per_head(lists: Lists, kv_len: int, block: int, q_len: int = 1) -> tuple[fs.Selection, Tensor]:
    """One list of each head for all its queries, and what it lets them see."""
    width = max(1, *(len(x) for x in lists))
    padded = torch.tensor([[x + [-1] * (width - len(x))] for x in lists])[None]
    seen = torch.stack([by_hand([x], (q_len, block), q_len, kv_len) for x in lists])[None]
    return selected(padded, (q_len, block), q_len, kv_len), seen


@pytest.mark.parametrize("q_len", [1, 7, 65])
@pytest.mark.parametrize("kv_len", [1024, 1000, 897])
@pytest.mark.parametrize("heads", [(4, 4), (12, 4), (4, 1), (4, 2)])
def test_each_head_may_pick_another_number_of_blocks(
    heads: tuple[int, int], kv_len: int, q_len: int
) -> None:
    """B12. One head picks five blocks, one none at all; lists per KV head or per query head."""
    inputs = tensors(q_len, kv_len, heads=heads)
    selection, seen = per_head(HEAD_LISTS, kv_len, 128, q_len)
    matches(inputs, seen.repeat_interleave(heads[0] // 4, 1), select=selection)
    causal = seen & (torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None])
    matches(inputs, causal.repeat_interleave(heads[0] // 4, 1), select=selection, rule=Causal())


@pytest.mark.parametrize("lists", [HEAD_LISTS, [[], [], [], []], [[0], [], [7], []]], ids=str)
def test_a_compiled_decoding_step_takes_a_list_for_each_head(lists: Lists) -> None:
    """B12. The decode kernel failed to compile on partial lists, and gave NaN where all were empty."""
    inputs = tensors(1, 1024, heads=(4, 4))
    selection, seen = per_head(lists, 1024, 128)
    close(fs.attention(*inputs, select=selection, backend="flex"), dense(*inputs, seen)[0])


@pytest.mark.parametrize("q_len", [1, 64, 65])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_no_candidate_at_all_gives_zero(heads: int, q_len: int) -> None:
    """B12. Every list empty, or no slot in any list: 0, lse -inf and zero gradients."""
    inputs = [x.requires_grad_() for x in tensors(q_len, 200, heads=(4, 2))]
    for width in (0, 1, 5):
        indices = torch.full((1, heads, q_len, width), -1)
        selection = selected(indices, (1, 1), q_len, 200)
        for options in ({}, {"rule": Causal()}, {"pack": "fold"}, {"sanitize": True}):
            out, lse = fs.attention(*inputs, select=selection, return_lse=True, **options)
            assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
            grads = torch.autograd.grad(out.sum(), inputs)
            assert all(bool((g == 0).all()) for g in grads)


# Repeats


REPEATED = [[0, 0, -1], [1, 0, 1], [2, 2, 2], [3, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_a_block_named_twice_counts_once(tile: int, dtype: torch.dtype) -> None:
    """B13. A repeated block weighed double, and its gradients disagreed with its forward."""
    selection = selected(torch.tensor(REPEATED, dtype=dtype), (64, 64), 256, 256)
    seen = by_hand(REPEATED, (64, 64), 256, 256)
    matches(tensors(256, 256), seen, select=selection, tile=tile)
    causal = seen & torch.ones(256, 256, dtype=torch.bool).tril()
    matches(tensors(256, 256), causal, select=selection, rule=Causal(), tile=tile)


def test_counts_are_those_of_the_set() -> None:
    """B13. Sparsity was reported over repeats; here candidates, pairs and tiles are counted once."""
    selection = selected(REPEATED, (64, 64), 256, 256)
    assert selection.counts.flatten().tolist() == [1, 2, 1, 2]
    layout = fs.build_layout(select=selection, grid=fs.Grid(256, 256), heads=(2, 2), block_size=64)
    budget = layout.budget()
    assert budget.logical_pairs == 2 * 6 * 64 * 64
    assert budget.physical_tiles == budget.full_tiles == 2 * 6
    assert budget.inflation == 1.0
    assert layout.block_mask.sparsity() == 62.5


@pytest.mark.parametrize("kv_len", [1, 7, 63, 64, 65, 200])
@pytest.mark.parametrize("form", ["dsa", "attn_gym", "msa", "nsa"])
def test_repeats_in_external_forms_count_once(form: str, kv_len: int) -> None:
    """B13. Every adapter makes sets; more slots than candidates, so that some repeat."""
    q_len, kv_heads = 9, 2
    draw = torch.Generator().manual_seed(kv_len)
    block = 1 if form in ("dsa", "attn_gym") else 16
    candidates = math.ceil(kv_len / block)
    indices = torch.randint(-1, candidates, (1, kv_heads, q_len, 12), generator=draw)
    if block == 1:
        indices = indices[:, :1]
    selection = {
        "dsa": lambda: fs.adapters.dsa(indices[:, 0], kv_len=kv_len),
        "attn_gym": lambda: fs.adapters.attn_gym(indices[:, 0], kv_len=kv_len),
        "msa": lambda: fs.adapters.msa(indices, kv_len=kv_len, block=16),
        "nsa": lambda: fs.adapters.nsa(indices.transpose(1, 2), kv_len=kv_len, block=16),
    }[form]()
    seen = torch.stack([by_hand(head.tolist(), (1, block), q_len, kv_len) for head in indices[0]])[
        None
    ]
    inputs = tensors(q_len, kv_len, heads=(4, 2))
    matches(inputs, seen.repeat_interleave(4 // seen.shape[1], 1), select=selection, tile=16)


@pytest.mark.parametrize(
    ("lists", "seen_blocks"),
    [
        (REPEATED, [[0], [1, 0], [2], [3, 0]]),
        ([[1, -1, -1], [1, 3, 1], [-1, -1, -1], [0, 2, 3]], [[1], [1, 3], [], [0, 2, 3]]),
        ([[0, 2, 3]] * 4, [[0, 2, 3]] * 4),
    ],
    ids=["repeated", "unused-in-between", "ring-cache"],
)
def test_a_compiled_kernel_counts_a_repeated_block_once(lists: Lists, seen_blocks: Lists) -> None:
    """B13, B71. Full tiles alone: no list of partial tiles at all, and every list its own tensor."""
    inputs = tensors(256, 256)
    selection = selected(lists, (64, 64), 256, 256)
    got = fs.attention(*inputs, select=selection, tile=64, backend="flex")
    close(got, dense(*inputs, by_hand(seen_blocks, (64, 64), 256, 256))[0])


# What is no candidate


def sparse_tokens(dtype: torch.dtype) -> Tensor:
    """96 lists of 12 keys below 199: slots 8, 9 are -1 and 10, 11 huge; row 3 names nothing."""
    draw = torch.Generator().manual_seed(4)
    indices = torch.randint(0, 199, (1, 1, 96, 12), generator=draw)
    indices[..., 8:10] = -1
    indices[..., 10:] = HUGE
    indices[:, :, 3] = -1
    return indices.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_conventions_for_no_pick_are_understood(dtype: torch.dtype) -> None:
    """B15. -1 wrapped to the last key, or numbers past the length were read."""
    indices = sparse_tokens(dtype)
    kept = [[c for c in row if 0 <= c < 200] for row in indices[0, 0].tolist()]
    seen = by_hand(kept, (1, 1), 96, 200)
    assert not bool(seen[:, 199].any()) and not bool(seen[3].any())
    inputs = tensors(96, 200)
    for selection in (
        selected(indices, (1, 1), 96, 200, out_of_range="drop"),
        fs.adapters.dsa(indices[:, 0], kv_len=200, out_of_range="drop"),
        fs.adapters.attn_gym(indices[:, 0], kv_len=200, out_of_range="drop"),
    ):
        matches(inputs, seen, select=selection, tile=32)


@pytest.mark.parametrize("value", [200, 201, HUGE, 2**31 - 1, -2, -200, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_outside_the_keys_is_an_error_that_says_where(
    dtype: torch.dtype, value: int
) -> None:
    """B15, B72. A slot inside the valid count was -1 or past the end, and memory was read there."""
    indices = torch.zeros(2, 3, 5, 4, dtype=dtype)
    indices[..., 3] = -1
    indices[1, 2, 4, 1] = value
    message = rf"{value} at batch 1, head 2, row 4 .*200"
    with pytest.raises(fs.FlexSparseError, match=message):
        selected(indices, (1, 1), 5, 200)
    with pytest.raises(fs.FlexSparseError, match=rf"{value} at batch 1, head 2, row 4"):
        fs.adapters.msa(indices, kv_len=200, block=1)
    with pytest.raises(fs.FlexSparseError, match=rf"{value} at batch 1, head 2, row 4"):
        fs.adapters.nsa(indices.transpose(1, 2), kv_len=200, block=1)
    with pytest.raises(fs.FlexSparseError, match=rf"{value} at batch 1, head 0, row 4"):
        fs.adapters.dsa(indices[:, 2], kv_len=200)


@pytest.mark.parametrize("value", [2**31, 2**32 + 1, 2**40, -(2**40), 2**63 - 1])
def test_a_64_bit_index_does_not_wrap_into_the_keys(value: int) -> None:
    """B15. Narrowing to 32 bits must not turn garbage into a key."""
    indices = torch.tensor([[[[5, value]]]])
    with pytest.raises(fs.FlexSparseError, match=f"{value} at batch 0"):
        selected(indices, (1, 1), 1, 200)
    dropped = selected(indices, (1, 1), 1, 200, out_of_range="drop")
    assert dropped.indices.tolist() == [[[[5, -1]]]]


@pytest.mark.parametrize("bad", [-1, -2, 4, 5, 10**6, 2**31 - 1])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_slot_among_valid_ones_is_ignored_where_asked(place: int, bad: int) -> None:
    """B72. Blocks of 256 keys, one slot of garbage: never read, and the other block still counts."""
    lists = [[bad, 2] if place == 0 else [2, bad]] * 4
    selection = selected(lists, (64, 64), 256, 256, out_of_range="drop")
    matches(tensors(256, 256), by_hand([[2]] * 4, (64, 64), 256, 256), select=selection, tile=64)
    if bad != -1:
        with pytest.raises(fs.FlexSparseError, match=f"{bad} at batch 0, head 0, row 0"):
            selected(lists, (64, 64), 256, 256)


def test_the_last_partial_block_is_a_candidate_and_the_next_is_none() -> None:
    """B72. 200 keys are four blocks of 64: 3 is the ragged last, 4 lies outside."""
    inputs = tensors(64, 200)
    seen = by_hand([[3]], (64, 64), 64, 200)
    matches(inputs, seen, select=selected([[3]], (64, 64), 64, 200), tile=64)
    with pytest.raises(fs.FlexSparseError, match=r"4 at batch 0.*0\.\.3"):
        selected([[4]], (64, 64), 64, 200)


def test_checking_indices_inside_a_compiled_region_is_refused_with_the_way_out() -> None:
    """B72. There the host cannot look: the error names 'drop', which works."""

    def select(indices: Tensor, how: str) -> Tensor:
        return fs.Selection.from_indices(indices, kv_len=8, q_len=1, out_of_range=how).indices

    indices = torch.tensor([[[[1, 9, 1]]]])
    compiled = torch.compile(select, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="out_of_range='drop'"):
        compiled(indices, "error")
    assert compiled(indices, "drop").tolist() == [[[[1, -1, -1]]]]


@pytest.mark.parametrize(
    ("indices", "advice"),
    [
        (torch.zeros(1, 4, 2), "int32 or int64"),
        (torch.zeros(1, 4, 4, dtype=torch.bool), "rule"),
        (torch.zeros(1, 4, 2, dtype=torch.int64), "adapters.dsa"),
        (torch.zeros(1, 4, 2, 2, dtype=torch.int64), "adapters.nsa"),
        (torch.zeros(1, 1, 3, 2, dtype=torch.int64), "R = 3"),
        (torch.zeros(4, 2, dtype=torch.int64), "2 axes"),
        (torch.zeros(0, 1, 4, 2, dtype=torch.int64), "at least one"),
        ([[[[0]]]], "tensor"),
    ],
)
def test_indices_of_the_wrong_form_are_refused_with_the_right_one(
    indices: Any, advice: str
) -> None:
    """B15. Axis order and row count are the usual mistakes: the message says which adapter fits."""
    with pytest.raises(fs.FlexSparseError, match=advice):
        fs.Selection.from_indices(indices, kv_len=8, q_len=4)


def test_a_selection_whose_heads_fit_nothing_is_refused() -> None:
    """B12. 3 lists for 4 query heads over 2 KV heads: nobody can say whose they are."""
    selection = selected(torch.zeros(1, 3, 1, 1, dtype=torch.int64), (1, 1), 1, 8)
    with pytest.raises(fs.FlexSparseError, match="3 heads.*2.*4"):
        fs.attention(*tensors(1, 8, heads=(4, 2)), select=selection)


# Budgets


@dataclass(frozen=True, eq=False, kw_only=True)
class Newest(fs.Selector):
    """A user's own selector: later blocks are better."""

    def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
        rows, blocks = grid.shape(self.q_block, self.block)
        return torch.arange(blocks, dtype=torch.float32).expand(q.shape[0], 1, rows, blocks)


SELECTORS: list[type[fs.Selector]] = [Quest, Random, OracleTopK, Newest]


@pytest.mark.parametrize("kind", SELECTORS)
@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(100, 100), (1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (1, 50), (5, 200)],
)
@pytest.mark.parametrize("block", [16, 64])
def test_a_budget_beyond_the_candidates_is_dense(
    block: int, q_len: int, kv_len: int, kind: type[fs.Selector]
) -> None:
    """B17, B22. torch.topk raised for short sequences; a floored budget dropped the last chunk."""
    inputs = tensors(q_len, kv_len, heads=(4, 2))
    causal = torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]
    for keep in (math.ceil(kv_len / block), 16, 1000):
        selector = kind(block=block, keep=keep, q_block=16)
        matches(inputs, causal, select=selector, rule=Causal())
        matches(inputs, torch.ones_like(causal), select=selector)


@pytest.mark.parametrize("kind", SELECTORS)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_budget_is_spent_in_full_and_only_on_what_the_rule_reaches(
    kind: type[fs.Selector], keep: int
) -> None:
    """B17, B22. Each row keeps min(budget, visible blocks): none of it goes to the future."""
    q, k, v = tensors(100, 100, batch=2, heads=(4, 2))
    grid = fs.Grid(100, 100, batch=2)
    chosen = kind(block=16, keep=keep, q_block=16).select(q, k, grid, Causal())
    visible = torch.arange(1, 8)
    assert torch.equal(chosen.counts, visible.clip(max=keep).expand(chosen.counts.shape))
    assert bool((chosen.indices <= torch.arange(7)[:, None]).all())
    lengths = torch.tensor([40, 0])
    padded = kind(block=16, keep=keep, q_block=16).select(q, k, grid, RightPadding(lengths))
    reach = torch.tensor([[3, 3, 3, 0, 0, 0, 0], [0] * 7])[:, None]
    assert torch.equal(padded.counts, reach.clip(max=keep).expand(padded.counts.shape))
    assert fs.check(q, k, v, rule=RightPadding(lengths), select=padded).ok


@pytest.mark.parametrize("block", [1, 7, 16, 64])
def test_quest_keeps_the_pages_of_highest_bound(block: int) -> None:
    """B22. Against its definition, page by page and head by head, in plain loops."""
    q, k, _ = tensors(5, 100, heads=(4, 2), dim=8)
    pages = math.ceil(100 / block)
    keep = min(3, pages)
    chosen = Quest(block=block, keep=keep, q_block=5).select(q, k, fs.Grid(5, 100))
    for g in range(2):
        bound = []
        for p in range(pages):
            page = k[0, g, p * block : (p + 1) * block]
            low, high = page.amin(0), page.amax(0)
            heads = q[0, g * 2 : g * 2 + 2]
            bound.append(float(torch.maximum(heads * low, heads * high).sum(-1).max()))
        best = sorted(range(pages), key=lambda p: -bound[p])[:keep]
        assert chosen.indices[0, g, 0].tolist() == sorted(best)


def test_equal_scores_go_to_the_lower_index() -> None:
    """B17. Ties are not left to the device."""

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Flat(fs.Selector):
        def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
            return torch.zeros(q.shape[0], 1, *grid.shape(self.q_block, self.block))

    q, k, _ = tensors(3, 200)
    chosen = Flat(block=8, keep=4, q_block=1).select(q, k, fs.Grid(3, 200))
    assert chosen.indices.flatten(0, 2).tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_never_selects_garbage(bad: float) -> None:
    """B72. NaN and infinities among the scores: unique candidates inside the keys, as many as asked."""

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Broken(fs.Selector):
        def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
            rows, blocks = grid.shape(self.q_block, self.block)
            score = torch.arange(blocks, dtype=torch.float32).repeat(q.shape[0], 1, rows, 1)
            score[..., ::2] = bad
            return score

    q, k, v = tensors(3, 200)
    chosen = Broken(block=8, keep=4, q_block=1).select(q, k, fs.Grid(3, 200), Causal())
    best = [0, 2, 4, 6] if bad == math.inf else [17, 19, 21, 23]
    assert chosen.indices.flatten(0, 2).tolist() == [best] * 3
    assert fs.check(q, k, v, rule=Causal(), select=chosen).ok


def globally_best(kept: int) -> list[list[int]]:
    """The best pairs of an 8x8 matrix of block scores, whatever their rows."""
    score = torch.rand(8, 8, generator=torch.Generator().manual_seed(3))
    best = score.flatten().topk(kept).indices.tolist()
    return [[x % 8 for x in best if x // 8 == row] for row in range(8)]


def padded_lists(lists: Lists) -> Lists:
    width = max(len(x) for x in lists)
    return [x + [-1] * (width - len(x)) for x in lists]


@pytest.mark.parametrize("kept", [1, 6, 12])
@pytest.mark.parametrize("tile", [64, 128])
def test_a_budget_over_all_rows_may_leave_rows_empty(tile: int, kept: int) -> None:
    """B20. Query blocks without a key are 0 with lse -inf; the others are dense over their blocks."""
    lists = globally_best(kept)
    selection = selected(padded_lists(lists), (64, 64), 512, 512)
    seen = by_hand(lists, (64, 64), 512, 512)
    assert not bool(seen.any(-1).all())
    matches(tensors(512, 512), seen, select=selection, tile=tile)


@pytest.mark.parametrize(
    "fallback", ["self", ("local", 1), ("local", 5), ("local", 64), ("local", 100)]
)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("q_len", [1, 9, 130])
def test_an_empty_query_may_fall_back_to_its_neighbours(
    q_len: int, heads: int, fallback: Any
) -> None:
    """B20. Query by query, after rule and selection, and never against the rule."""
    draw = torch.Generator().manual_seed(5)
    chosen = torch.rand(2, heads, q_len, 17, generator=draw) < 0.08
    selection = selected(torch.where(chosen, torch.arange(17), -1), (1, 8), q_len, 130)
    position = torch.arange(130 - q_len, 130)[:, None]
    key = torch.arange(130)[None, :]
    lengths = torch.tensor([130, 60])
    ruled = (key <= position) & (key % 7 != 3) & (key < lengths[:, None, None, None])
    picked = chosen.repeat_interleave(8, -1)[..., :130].repeat_interleave(4 // heads, 1)
    seen = picked & ruled
    reach = 1 if fallback == "self" else fallback[1]
    near = (key <= position) & (position - key < reach) & ruled
    seen = torch.where(seen.any(-1, keepdim=True), seen, near)
    rule = fs.MaskRule.of(lambda b, h, q, kv: (kv <= q) & (kv % 7 != 3) & (kv < lengths[b]))
    for pack in ("identity", "fold", "pack")[: 3 if heads < 4 else 2]:
        matches(
            tensors(q_len, 130, batch=2, heads=(4, 2)), seen,
            rule=rule, select=selection, fallback=fallback, tile=16, pack=pack,
        )  # fmt: skip


@pytest.mark.parametrize("pack", ["identity", "fold", "pack"])
def test_an_empty_query_may_be_an_error_that_names_it(pack: str) -> None:
    """B20. Not silently: the first such row, by batch, head and query."""
    indices = torch.zeros(2, 2, 9, 1, dtype=torch.int64)
    indices[1, 1, 4] = -1
    inputs = tensors(9, 8, batch=2, heads=(4, 2))
    options: dict[str, Any] = {"select": selected(indices, (1, 1), 9, 8), "pack": pack}
    with pytest.raises(fs.FlexSparseError, match="query 4 of batch 1, head 2"):
        fs.attention(*inputs, empty="error", **options)
    out = fs.attention(*inputs, **options)
    assert bool((out[1, 2:, 4] == 0).all())
    seen = torch.ones(2, 4, 9, 8, dtype=torch.bool)
    seen[..., 1:] = False
    seen[1, 2:, 4] = torch.arange(8) == 3
    own = dense(*inputs, seen)[0]
    got = fs.attention(*inputs, empty="error", fallback="self", **options)
    close(got, own)


def test_a_rule_alone_may_leave_rows_empty_too() -> None:
    """B20. The same error without any selection."""
    inputs = tensors(12, 5)
    with pytest.raises(fs.FlexSparseError, match="query 0 of batch 0, head 0"):
        fs.attention(*inputs, rule=Causal(), empty="error")
    with pytest.raises(fs.FlexSparseError, match="empty"):
        fs.attention(*inputs, rule=Causal(), empty="none")


# Lists as torch's BlockMask


@pytest.mark.parametrize("form", ["msa", "nsa", "indices"])
def test_a_list_narrower_than_the_number_of_blocks_works(form: str) -> None:
    """B24. Two slots naming blocks up to 7: building, printing, transposing and running it failed."""
    lists = [[0, row] for row in range(8)]
    inputs = tensors(512, 512, heads=(4, 2))
    each = torch.tensor(lists).repeat_interleave(64, 0)[None, None].expand(-1, 2, -1, -1)
    selection = {
        "msa": lambda: fs.adapters.msa(each, kv_len=512, block=64),
        "nsa": lambda: fs.adapters.nsa(each.transpose(1, 2), kv_len=512, block=64),
        "indices": lambda: selected(lists, (64, 64), 512, 512),
    }[form]()
    seen = by_hand(lists, (64, 64), 512, 512)
    matches(inputs, seen, select=selection, tile=64)
    layout = fs.build_layout(select=selection, grid=fs.Grid(512, 512), heads=(4, 2), block_size=64)
    blocks = torch.tensor([[c in (0, r) for c in range(8)] for r in range(8)])
    partial, full = layout.tile_maps()
    assert torch.equal((partial | full)[0, 0], blocks)
    mask = layout.block_mask
    assert isinstance(mask, BlockMask)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)
    assert "BlockMask" in repr(mask) and "BlockMask" in str(mask)
    assert "Layout" in repr(layout)


@pytest.mark.parametrize("block_size", [16, (32, 64), (128, 16), 200])
def test_lists_by_column_are_the_lists_by_row_turned(block_size: Any) -> None:
    """B24. What a backward walks is what the forward walked."""
    draw = torch.Generator().manual_seed(1)
    indices = torch.randint(-1, 13, (2, 4, 65, 3), generator=draw)
    layout = fs.build_layout(
        rule=Causal(), select=selected(indices, (1, 16), 65, 200),
        grid=fs.Grid(65, 200, batch=2), heads=(4, 2), block_size=block_size,
    )  # fmt: skip
    for maps, counts, slots in zip(
        layout.tile_maps(), layout.lists[4::2], layout.lists[5::2], strict=True
    ):
        for b in range(2):
            for h in range(4):
                for c in range(maps.shape[-1]):
                    rows = slots[b, h, c, : int(counts[b, h, c])].tolist()
                    assert rows == maps[b, h, :, c].nonzero()[:, 0].tolist()
    assert not bool((layout.tile_maps()[0] & layout.tile_maps()[1]).any())


def sparse_blocks(seed: int = 0) -> tuple[Lists, Tensor]:
    kept = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed)) < 0.4
    lists = [row.nonzero()[:, 0].tolist() for row in kept]
    return lists, by_hand(lists, (64, 64), 512, 512)


@pytest.mark.parametrize(
    "options", [{}, {"backend": "tiles"}, {"pack": "fold"}, {"tile": 64}, {"tile": 48}]
)
def test_candidates_without_a_rule_are_honoured(options: dict[str, Any]) -> None:
    """B25. A backend looked at the trivial rule alone and computed dense attention."""
    lists, seen = sparse_blocks()
    selection = selected(padded_lists(lists), (64, 64), 512, 512)
    matches(tensors(512, 512), seen, select=selection, **options)


def test_candidates_without_a_rule_are_honoured_by_the_compiled_kernel() -> None:
    """B25, in the fused kernel: partial and full tiles."""
    lists, seen = sparse_blocks()
    inputs = tensors(512, 512)
    selection = selected(padded_lists(lists), (64, 64), 512, 512)
    got = fs.attention(*inputs, select=selection, backend="flex")
    close(got, dense(*inputs, seen)[0])


@pytest.mark.parametrize("block_size", [64, 128, (64, 128), 48])
def test_the_masks_own_rule_holds_the_candidates(block_size: Any) -> None:
    """B25. Eager FlexAttention ignores block lists: even so it must give the sparse answer."""
    lists, seen = sparse_blocks()
    layout = fs.build_layout(
        select=selected(padded_lists(lists), (64, 64), 512, 512),
        grid=fs.Grid(512, 512), heads=(2, 2), block_size=block_size,
    )  # fmt: skip
    inputs = tensors(512, 512)
    with torch.no_grad():
        got = flex_attention(*inputs, block_mask=layout.block_mask)
    close(got, dense(*inputs, seen)[0])


@pytest.mark.parametrize("written", [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("q_len", [1, 64, 256])
def test_the_written_blocks_of_a_ring_cache_are_attended(q_len: int, written: list[int]) -> None:
    """B71. 'No partial tile, these full ones': one index tensor given twice broke the compile."""
    inputs = tensors(q_len, 256)
    kept = [c for c in range(4) if written[c]]
    slots = kept + [-1] * (4 - len(kept))
    selection = selected([slots], (q_len, 64), q_len, 256)
    seen = by_hand([kept], (q_len, 64), q_len, 256)
    matches(inputs, seen, select=selection, tile=64)


@pytest.mark.parametrize("rule", [None, Causal()])
@pytest.mark.parametrize("lists", [None, [[0, 2, 3]] * 4, [[-1]] * 4])
def test_no_two_lists_of_a_layout_share_a_slot(rule: fs.MaskRule | None, lists: Any) -> None:
    """B71. Eight tensors of one kind: int32, partial and full alike in strides, and nothing written twice."""
    select = None if lists is None else selected(lists, (64, 64), 256, 256)
    layout = fs.build_layout(
        rule=rule, select=select, grid=fs.Grid(256, 256), heads=(2, 2), block_size=64
    )
    own = [x.clone() for x in layout.lists]
    for i, x in enumerate(layout.lists):
        x.fill_(-7)
        others = layout.lists[:i] + layout.lists[i + 1 :]
        assert all(map(torch.equal, others, own[:i] + own[i + 1 :]))
        x.copy_(own[i])
    assert len({x.data_ptr() for x in layout.lists}) == 8
    for partial, full in zip(
        layout.lists[0:2] + layout.lists[4:6], layout.lists[2:4] + layout.lists[6:8], strict=True
    ):
        assert partial.stride() == full.stride() and partial.stride(-1) == 1
        assert partial.dtype == full.dtype == torch.int32
    assert all(x.is_contiguous() for x in layout.lists[:4])
