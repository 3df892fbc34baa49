"""What must not change a result, and what must change it in a known way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dense
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Alibi, Causal, Document, HeadBias, RightPadding, SlidingWindow

ATOL = 5e-6
HYPOTHESIS = settings(deadline=None, derandomize=True, max_examples=40)


@dataclass
class Problem:
    """Tensors and candidates of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    q_block: int
    kv_block: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def selection(self) -> fs.Selection:
        return self.select(self.indices)

    def select(self, indices: Tensor) -> fs.Selection:
        return fs.Selection.from_indices(
            indices,
            kv_len=self.k.shape[2],
            q_len=self.q.shape[2],
            q_block=self.q_block,
            kv_block=self.kv_block,
        )


def problem(
    lists: int = 2,
    *,
    q_len: int = 65,
    kv_len: int = 200,
    heads: tuple[int, int] = (6, 2),
    q_block: int = 16,
    kv_block: int = 16,
    keep: int = 5,
    batch: int = 2,
    seed: int = 0,
) -> Problem:
    """Random tensors; ``keep`` candidates a row, none at all in its first row."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads[0], q_len, 16, generator=draw)
    k, v = (torch.randn(batch, heads[1], kv_len, 16, generator=draw) for _ in range(2))
    rows, candidates = math.ceil(q_len / q_block), math.ceil(kv_len / kv_block)
    order = torch.rand(batch, lists, rows, candidates, generator=draw).argsort(-1)
    indices = order[..., : min(keep, candidates)].clone()
    if rows > 1:
        indices[:, 0, 0] = -1
    return Problem(q, k, v, indices, q_block, kv_block)


def everything(
    tensors: tuple[Tensor, ...], learned: tuple[Tensor, ...] = (), **options: Any
) -> list[Tensor]:
    """out, lse and the gradients of all inputs and learned tensors, for one fixed loss."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = fs.attention(*leaves, return_lse=True, **options)
    return [out.detach(), lse.detach(), *gradients(out, lse, [*leaves, *learned])]


def gradients(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(9)
    weight = torch.randn(out.shape, generator=draw)
    weight_lse = torch.randn(lse.shape, generator=draw)
    loss = (out * weight).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * weight_lse).sum()
    return list(torch.autograd.grad(loss, leaves))


def close(got: Any, want: Any, atol: float = ATOL) -> None:
    for have, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(have.double(), wanted.double(), atol=atol, rtol=1e-5)


@pytest.fixture(params=[1, 2, 6], ids=["shared", "per-kv-head", "per-query-head"])
def given_lists(request: pytest.FixtureRequest) -> Problem:
    return problem(request.param)


# Candidates are sets


def shuffled(indices: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return indices.gather(-1, torch.rand(indices.shape, generator=draw).argsort(-1))


def doubled(indices: Tensor) -> Tensor:
    """Unevenly: a list in which all count twice would be the same softmax."""
    return torch.cat([indices, indices[..., :2], indices[..., :1], indices[..., :1]], -1)


def interleaved(indices: Tensor) -> Tensor:
    return torch.stack([torch.full_like(indices, -1), indices], -1).flatten(-2)


REWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda x: x.flip(-1),
    "shuffled": shuffled,
    "doubled": doubled,
    "interleaved": interleaved,
    "padded": lambda x: torch.cat([x, torch.full_like(x, -1)], -1),
    "padded-in-front": lambda x: torch.cat([torch.full_like(x, -1), x], -1),
    "int32": lambda x: x.to(torch.int32),
    "transposed-memory": lambda x: x.mT.contiguous().mT,
    "all-at-once": lambda x: shuffled(interleaved(doubled(x))).to(torch.int32),
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_the_same_set_written_differently_is_the_same_attention(
    given_lists: Problem, how: str
) -> None:
    """Order, repeats, padding and integer type of a list mean nothing: out, lse, all gradients."""
    want = everything(given_lists.tensors, rule=Causal(), select=given_lists.selection, tile=32)
    rewritten = given_lists.select(REWRITTEN[how](given_lists.indices))
    assert torch.equal(rewritten.counts, given_lists.selection.counts)
    close(everything(given_lists.tensors, rule=Causal(), select=rewritten, tile=32), want)


@pytest.mark.parametrize("how", ["shuffled", "doubled", "interleaved"])
@pytest.mark.parametrize("kv_len", [1, 7, 63, 64, 65, 200])
def test_the_same_set_of_tokens_is_the_same_attention_at_any_length(how: str, kv_len: int) -> None:
    """Token by token, one query at a time, lengths around and below a tile."""
    p = problem(2, q_len=7, kv_len=kv_len, q_block=1, kv_block=1, keep=9)
    want = everything(p.tensors, select=p.selection, tile=16)
    close(everything(p.tensors, select=p.select(REWRITTEN[how](p.indices)), tile=16), want)


def test_the_answer_is_the_dense_one_over_the_sets(given_lists: Problem) -> None:
    """The base of every relation here: one of them against the definition."""
    p = given_lists
    chosen = torch.zeros(2, p.indices.shape[1], 80, 208 + 16, dtype=torch.bool)
    for b, h, row, _ in (p.indices >= 0).nonzero().tolist():
        for c in p.indices[b, h, row].tolist():
            if c >= 0:
                chosen[b, h, row * 16 : row * 16 + 16, c * 16 : c * 16 + 16] = True
    seen = chosen[:, :, :65, :200].repeat_interleave(6 // p.indices.shape[1], 1)
    seen = seen & (torch.arange(200) <= torch.arange(135, 200)[:, None])
    got = everything(p.tensors, rule=Causal(), select=p.selection)
    leaves = [x.clone().requires_grad_() for x in p.tensors]
    out, lse = dense(*leaves, seen)
    close(got, [out, lse, *gradients(out, lse, leaves)])


# Parts and their merge


@pytest.mark.parametrize("cuts", [(0,), (1,), (2, 4), (1, 2, 3), (0, 5)])
def test_parts_over_disjoint_candidates_merge_to_the_whole(
    given_lists: Problem, cuts: tuple[int, ...]
) -> None:
    """The whole is the merge of its parts, empty parts among them; gradients flow through the merge."""
    p = given_lists
    want = everything(p.tensors, rule=Causal(), select=p.selection, tile=32)
    leaves = [x.clone().requires_grad_() for x in p.tensors]
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, 5), strict=True):
        part = p.select(p.indices[..., start:stop])
        plan = fs.make_plan(*leaves, rule=Causal(), select=part, tile=32)
        parts.append(plan.run(*leaves, return_lse=True).partial)
    whole = fs.merge(parts)
    close([*whole, *gradients(*whole, leaves)], want, atol=2e-5)
    close(fs.merge(parts[::-1]), whole)
    if len(parts) > 2:
        close(fs.merge([parts[0], fs.merge(parts[1:])]), whole)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 135, 199])
def test_parts_over_ranges_of_keys_merge_to_the_whole(cut: int) -> None:
    """Keys cut in two, as over ranks or pages: the second part counts its positions from the cut."""
    p = problem()
    draw = torch.Generator().manual_seed(1)
    bias = torch.randn(6, 30, generator=draw).requires_grad_()
    rule, score = SlidingWindow(90), Alibi(torch.rand(6, generator=draw)) >> HeadBias(bias)
    want = everything(p.tensors, (bias,), rule=rule, score=score)
    leaves = [x.clone().requires_grad_() for x in p.tensors]
    q, k, v = leaves
    offset = 200 - 65
    parts = [
        fs.Partial(*fs.attention(q, k[:, :, :cut], v[:, :, :cut], rule=rule, score=score,
                                 q_offset=offset, return_lse=True)),
        fs.Partial(*fs.attention(q, k[:, :, cut:], v[:, :, cut:], rule=rule, score=score,
                                 q_offset=offset - cut, return_lse=True)),
    ]  # fmt: skip
    whole = fs.merge(parts)
    close([*whole, *gradients(*whole, [*leaves, bias])], want, atol=5e-5)


@pytest.mark.parametrize("cut", [1, 7, 63, 64])
def test_parts_over_ranges_of_queries_are_rows_of_the_whole(cut: int) -> None:
    """Chunked prefill: a chunk of queries, told where it stands, gives those rows."""
    p = problem(1, q_block=1)
    out, lse = fs.attention(*p.tensors, rule=Causal(), select=p.selection, return_lse=True)
    for start, stop in ((0, cut), (cut, 65)):
        part = fs.Selection.from_indices(
            p.indices[:, :, start:stop], kv_len=200, q_len=stop - start, kv_block=16
        )
        got = fs.attention(
            p.q[:, :, start:stop], p.k, p.v, rule=Causal(), select=part, q_offset=135 + start,
            return_lse=True,
        )  # fmt: skip
        close(got, (out[:, :, start:stop], lse[:, :, start:stop]))


def test_parts_that_saw_nothing_merge_to_nothing() -> None:
    """0 and -inf, without NaN, also in the gradients."""
    p = problem()
    leaves = [x.clone().requires_grad_() for x in p.tensors]
    nothing = p.select(torch.full_like(p.indices, -1))
    part = fs.Partial(*fs.attention(*leaves, select=nothing, return_lse=True))
    whole = fs.merge([part, part, part])
    assert bool((whole.out == 0).all())
    assert bool((whole.lse == -torch.inf).all())
    assert all(bool((g == 0).all()) for g in gradients(*whole, leaves))


# What is not listed is not read


def unlisted(plan: fs.Plan, kv_heads: int, kv_len: int) -> Tensor:
    """bool ``[B, Hkv, S]``: keys in tiles that no query head of their KV head lists."""
    layout = plan.first
    assert layout is not None
    partial, full = layout.tile_maps()
    batch, heads = plan.address.kernel_batch(plan.grid.batch), plan.address.kernel_heads[0]
    listed = (partial | full).expand(batch, heads, -1, -1).any(2)
    listed = plan.address.unpack(listed, plan.grid.batch)
    listed = listed.unflatten(1, (kv_heads, -1)).any(2)
    return ~listed.repeat_interleave(layout.block_size[1], -1)[..., :kv_len]


def poisoned(x: Tensor, where: Tensor, poison: float) -> Tensor:
    return x.masked_fill(where[..., None], poison)


POISONS = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("pack", ["identity", "fold"])
@pytest.mark.parametrize("sparse", ["selection", "rule", "both"])
def test_a_tile_that_is_not_listed_is_never_read(
    given_lists: Problem, sparse: str, pack: str, poison: float
) -> None:
    """Whatever K and V hold there, forward, lse and gradients stay what they were."""
    p = replace(given_lists, indices=given_lists.indices % 6)
    options: dict[str, Any] = {"tile": (32, 16), "pack": pack}
    if sparse != "rule":
        options["select"] = p.selection
    if sparse != "selection":
        options["rule"] = SlidingWindow(40)
    hidden = unlisted(fs.make_plan(*p.tensors, **options), 2, 200)
    assert bool(hidden.any(-1).all())
    want = everything(p.tensors, **options)
    got = everything((p.q, poisoned(p.k, hidden, poison), poisoned(p.v, hidden, poison)), **options)
    close(got, want)
    assert bool((got[3][hidden] == 0).all())
    assert bool((got[4][hidden] == 0).all())


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("fallback", [None, ("local", 20)])
def test_a_row_of_tiles_reads_its_own_tiles_alone(
    given_lists: Problem, fallback: Any, poison: float
) -> None:
    """Tiles that another head, sequence or row lists are not read on behalf of this one."""
    p = given_lists
    options: dict[str, Any] = {
        "rule": Causal(), "select": p.selection, "tile": (32, 16), "fallback": fallback,
    }  # fmt: skip
    plan = fs.make_plan(*p.tensors, **options)
    assert plan.first is not None
    partial, full = plan.first.tile_maps()
    shape = (plan.address.kernel_batch(2), plan.address.kernel_heads[0], -1, -1)
    listed = plan.address.unpack((partial | full).expand(shape), 2)
    want, want_lse = fs.attention(*p.tensors, return_lse=True, **options)
    for b, h, r in ((0, 0, 0), (0, 5, 1), (1, 2, 2), (1, 3, 0)):
        hidden = torch.ones(2, 2, 200, dtype=torch.bool)
        hidden[b, h // 3] = ~listed[b, h, r].repeat_interleave(16)[:200]
        k, v = (poisoned(x, hidden, poison) for x in (p.k, p.v))
        out, lse = fs.attention(p.q, k, v, return_lse=True, **options)
        row = slice(r * 32, r * 32 + 32)
        close([out[b, h, row], lse[b, h, row]], [want[b, h, row], want_lse[b, h, row]])


@pytest.mark.parametrize("poison", POISONS)
def test_the_queries_of_a_row_of_tiles_without_tiles_are_never_read(poison: float) -> None:
    """Padding rows may hold anything where their whole tile sees nothing."""
    q, k, v = problem(batch=2).tensors
    rule = RightPadding(torch.tensor([64, 200]))
    options = {"rule": rule, "tile": 32, "q_offset": 0}
    want = everything((q[:, :, :64].repeat(1, 1, 2, 1), k, v), **options)
    bad = q[:, :, :64].repeat(1, 1, 2, 1)
    bad[0, :, 64:] = poison
    close(everything((bad, k, v), **options), want)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_the_compiled_kernel_never_reads_a_tile_that_is_not_listed(poison: float) -> None:
    """The same promise of the fused kernel: lists per KV head, folded."""
    p = problem(2)
    p = replace(p, indices=p.indices % 6)
    plan = fs.make_plan(*p.tensors, rule=Causal(), select=p.selection, backend="flex", tile=32)
    hidden = unlisted(plan, 2, 200)
    assert bool(hidden.any(-1).all())
    want = fs.attention(*p.tensors, rule=Causal(), select=p.selection, backend="tiles")
    got = plan.run(p.q, poisoned(p.k, hidden, poison), poisoned(p.v, hidden, poison)).out
    close([got], [want])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_the_compiled_decoding_kernel_never_reads_a_tile_that_is_not_listed(poison: float) -> None:
    """The same for one query, lists per query head, one head without any tile."""
    p = problem(6, q_len=1, kv_len=520, kv_block=128, keep=2)
    indices = p.indices % 4
    indices[:, 4] = -1
    p = replace(p, indices=indices)
    plan = fs.make_plan(*p.tensors, select=p.selection, backend="flex", tile=128)
    hidden = unlisted(plan, 2, 520)
    assert bool(hidden.any(-1).all())
    want = fs.attention(*p.tensors, select=p.selection, backend="tiles")
    got = plan.run(p.q, poisoned(p.k, hidden, poison), poisoned(p.v, hidden, poison)).out
    close([got], [want])
    assert bool((got[:, 4] == 0).all())


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("pack", ["identity", "fold"])
def test_sanitize_clears_unseen_keys_inside_listed_tiles(
    given_lists: Problem, pack: str, poison: float
) -> None:
    """Garbage in unwritten slots of a cache that share a tile with written ones."""
    p = given_lists
    rule = RightPadding(torch.tensor([130, 77])) & fs.MaskRule.of(lambda b, h, q, kv: kv % 3 != 1)
    options: dict[str, Any] = {
        "rule": rule, "select": p.selection, "q_offset": 0, "sanitize": True, "pack": pack,
    }  # fmt: skip
    chosen = p.selection.dense().any(2).repeat_interleave(6 // p.indices.shape[1], 1)
    key = torch.arange(200)
    written = (key < torch.tensor([130, 77])[:, None]) & (key % 3 != 1)
    hidden = ~(chosen.unflatten(1, (2, 3)).any(2) & written[:, None])
    want = everything(p.tensors, **{**options, "sanitize": False})
    got = everything((p.q, poisoned(p.k, hidden, poison), poisoned(p.v, hidden, poison)), **options)
    close(got, want)
    close(everything(p.tensors, **options), want)
    assert bool((got[3][hidden] == 0).all())
    assert bool((got[4][hidden] == 0).all())


def test_sanitize_clears_per_head_what_that_head_does_not_see() -> None:
    """A rule by head: a key that one KV head reads is still garbage to the other."""
    q, k, v = problem().tensors
    rule = fs.MaskRule.of(lambda b, h, q, kv: (kv % 2 == h // 3) & (kv <= q))
    even = torch.arange(200) % 2 == 0
    hidden = torch.stack([~even, even])[None].expand(2, 2, 200)
    want = everything((q, k, v), rule=rule)
    bad = (q, poisoned(k, hidden, math.nan), poisoned(v, hidden, math.nan))
    close(everything(bad, rule=rule, sanitize=True), want)


# Equivariance


def test_sequences_of_a_batch_may_change_places(given_lists: Problem) -> None:
    """Permuting the batch, its documents, offsets and candidates permutes the result."""
    p = given_lists
    ids = torch.stack([torch.arange(200) // 70, torch.arange(200) // 23])
    offset = torch.tensor([135, 20])
    order = torch.tensor([1, 0])
    want = everything(p.tensors, rule=Document(ids) & Causal(), select=p.selection, q_offset=offset)
    moved = everything(
        tuple(x[order] for x in p.tensors),
        rule=Document(ids[order]) & Causal(),
        select=p.select(p.indices[order]),
        q_offset=offset[order],
    )
    close(moved[:2], [x[order] for x in want[:2]])


@pytest.mark.parametrize("pack", ["identity", "fold"])
def test_heads_may_change_places(given_lists: Problem, pack: str) -> None:
    """KV heads with their groups, and query heads within a group."""
    p = given_lists
    kv_order = torch.tensor([1, 0])
    q_order = torch.tensor([5, 3, 4, 1, 2, 0])
    slopes = torch.rand(6, generator=torch.Generator().manual_seed(2))
    lists = {1: torch.tensor([0]), 2: kv_order, 6: q_order}[p.indices.shape[1]]
    out, lse = fs.attention(
        *p.tensors, rule=Causal(), select=p.selection, score=Alibi(slopes), pack=pack,
        return_lse=True,
    )  # fmt: skip
    got = fs.attention(
        p.q[:, q_order], p.k[:, kv_order], p.v[:, kv_order], rule=Causal(),
        select=p.select(p.indices[:, lists]), score=Alibi(slopes[q_order]), pack=pack,
        return_lse=True,
    )  # fmt: skip
    close(got, (out[:, q_order], lse[:, q_order]))


def test_shared_lists_equal_the_same_list_for_each_head() -> None:
    """One list for all, repeated for each KV head, or for each query head; one for the whole batch."""
    p = problem(1)
    want = everything(p.tensors, rule=Causal(), select=p.selection)
    for heads in (2, 6):
        many = p.select(p.indices.expand(-1, heads, -1, -1))
        close(everything(p.tensors, rule=Causal(), select=many), want)
    alike = p.select(p.indices[:1])
    each = p.select(p.indices[:1].expand(2, -1, -1, -1))
    close(
        everything(p.tensors, rule=Causal(), select=alike),
        everything(p.tensors, rule=Causal(), select=each),
    )


def test_grouped_heads_equal_repeated_keys(given_lists: Problem) -> None:
    """GQA is attention over keys repeated for each query head; dK and dV are summed over the group."""
    p = given_lists
    want = everything(p.tensors, rule=Causal(), select=p.selection)
    k, v = (x.repeat_interleave(3, 1) for x in (p.k, p.v))
    lists = (
        p.indices
        if p.indices.shape[1] == 1
        else p.indices.repeat_interleave(6 // p.indices.shape[1], 1)
    )
    got = everything((p.q, k, v), rule=Causal(), select=p.select(lists))
    got[3:] = [g.unflatten(1, (2, 3)).sum(2) for g in got[3:]]
    close(got, want, atol=2e-5)


# Physical choices


@pytest.mark.parametrize("tile", [16, 17, 32, 100, (16, 128), (128, 16), (24, 40), (256, 64)])
@pytest.mark.parametrize("pack", [None, "identity", "fold"])
def test_tiles_and_packing_do_not_change_the_result(
    given_lists: Problem, tile: int | tuple[int, int], pack: Any
) -> None:
    """Tile sizes and how heads are laid are physical: results differ by rounding alone."""
    p = given_lists
    want = everything(p.tensors, rule=Causal(), select=p.selection)
    close(everything(p.tensors, rule=Causal(), select=p.selection, tile=tile, pack=pack), want)


def test_memory_order_does_not_change_the_result(given_lists: Problem) -> None:
    """Tensors laid out [B, S, H, D], as models hold them, and slices of larger buffers."""
    p = given_lists
    want = everything(p.tensors, rule=Causal(), select=p.selection)
    options: dict[str, Any] = {"rule": Causal(), "select": p.selection}
    for view in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, torch.full_like(x, math.nan)], 2)[:, :, : x.shape[2]],
        lambda x: torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]],
    ):
        close(fs.attention(*map(view, p.tensors), return_lse=True, **options), want[:2])


def test_the_same_call_gives_the_same_bits(given_lists: Problem) -> None:
    """Same plan, same inputs: the same bits, forward and backward."""
    p = given_lists
    options = {"rule": Causal(), "select": p.selection, "score": lambda s, b, h, q, kv: s * 0.5}
    first, second = everything(p.tensors, **options), everything(p.tensors, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_candidates_as_rule_or_as_selection_are_the_same_attention() -> None:
    """What is worth seeing may be told as a table that a rule reads: the kernels must agree."""
    p = problem(6)
    table = torch.zeros(2, 6, 5, 14, dtype=torch.bool)
    table.scatter_(-1, torch.where(p.indices < 0, 13, p.indices), True)
    told = fs.MaskRule.of(lambda b, h, q, kv: table[b, h, (q - 135) // 16, kv // 16])
    want = everything(p.tensors, rule=Causal(), select=p.selection, tile=32)
    close(everything(p.tensors, rule=told & Causal(), tile=32), want)


@pytest.mark.parametrize("more", [1, 63, 64])
def test_keys_nobody_sees_change_nothing(more: int) -> None:
    """Room behind the last key, as in a preallocated cache."""
    p = problem()
    want = everything(p.tensors, rule=Causal(), q_offset=135)
    k, v = (torch.cat([x, torch.randn(2, 2, more, 16)], 2) for x in (p.k, p.v))
    got = everything((p.q, k, v), rule=Causal(), q_offset=135)
    got[3:] = [g[:, :, :200] for g in got[3:]]
    close(got, want)


# Scores and sinks


@pytest.mark.parametrize("constant", [0.0, 3.5, -40.0, 90.0])
def test_a_constant_added_to_the_scores_changes_lse_alone(
    given_lists: Problem, constant: float
) -> None:
    """Softmax forgets a constant; lse carries it, also where exp of it would overflow."""
    p = given_lists
    options: dict[str, Any] = {"rule": Causal(), "select": p.selection, "return_lse": True}
    out, lse = fs.attention(*p.tensors, **options)
    for score, added in (
        (lambda s, b, h, q, kv: s + constant, torch.tensor(constant)),
        (
            lambda s, b, h, q, kv: s + constant * (q % 2) + h,
            constant * (torch.arange(135, 200) % 2) + torch.arange(6)[:, None],
        ),
    ):
        got, got_lse = fs.attention(*p.tensors, score=score, **options)
        close([got], [out], atol=2e-5)
        close([got_lse], [lse + added], atol=2e-5)


@pytest.mark.parametrize("q_len", [1, 7, 65])
@pytest.mark.parametrize("lists", [1, 2, 6])
def test_a_sink_is_a_key_of_that_logit_and_no_value(lists: int, q_len: int) -> None:
    """out, lse and every gradient, for rows that see nothing else too."""
    p = problem(lists, q_len=q_len)
    sink = torch.tensor([0.0, 2.0, -3.0, 30.0, -60.0, 1.0], requires_grad=True)
    want = everything(p.tensors, (sink,), rule=Causal(), select=p.selection, sink=sink)
    logit = sink.detach().clone().requires_grad_()
    k, v = (torch.cat([torch.zeros(2, 2, 1, 16), x], 2) for x in (p.k, p.v))
    seen = p.selection.dense().repeat_interleave(6 // lists, 1)
    seen = torch.cat([torch.ones(2, 6, q_len, 1, dtype=torch.bool), seen], -1)
    rule = fs.MaskRule.of(
        lambda b, h, q, kv: ((kv == 0) | (kv <= q)) & seen[b, h, q - (201 - q_len), kv]
    )
    got = everything(
        (p.q, k, v),
        (logit,),
        rule=rule,
        score=lambda s, b, h, q, kv: torch.where(kv == 0, logit[h], s),
    )
    got[3:5] = [g[:, :, 1:] for g in got[3:5]]
    close(got, want, atol=2e-5)


def test_scaling_queries_is_scaling_scores() -> None:
    """``scale`` is a factor of the scores, before the score rule."""
    p = problem()
    twice = fs.attention(p.q * 2, p.k, p.v, rule=Causal(), scale=0.1)
    close([twice], [fs.attention(*p.tensors, rule=Causal(), scale=0.2)])
    close(
        [twice],
        [fs.attention(*p.tensors, rule=Causal(), scale=0.1, score=lambda s, b, h, q, kv: s * 2)],
    )


def test_attention_is_linear_in_the_values(given_lists: Problem) -> None:
    """Weights do not depend on V; they sum to one where anything is seen, and to zero elsewhere."""
    p = given_lists
    options: dict[str, Any] = {"rule": Causal(), "select": p.selection}
    other = torch.randn(p.v.shape, generator=torch.Generator().manual_seed(4))
    both = fs.attention(p.q, p.k, 2 * p.v - other, **options)
    each = [fs.attention(p.q, p.k, v, **options) for v in (p.v, other)]
    close([both], [2 * each[0] - each[1]], atol=1e-5)
    ones, lse = fs.attention(p.q, p.k, torch.ones_like(p.v), return_lse=True, **options)
    close([ones], [(lse > -torch.inf)[..., None].expand_as(ones).float()])


# Sets


@st.composite
def selections(draw: st.DrawFn, q_len: int, kv_len: int) -> fs.Selection:
    q_block = draw(st.sampled_from([1, 2, 4]))
    kv_block = draw(st.sampled_from([1, 2, 4, 8]))
    rows, candidates = math.ceil(q_len / q_block), math.ceil(kv_len / kv_block)
    batch, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    keep = draw(st.integers(0, 6))
    seed = draw(st.integers(0, 2**20))
    indices = torch.randint(
        -1, candidates, (batch, heads, rows, keep), generator=torch.Generator().manual_seed(seed)
    )
    return fs.Selection.from_indices(
        indices, kv_len=kv_len, q_len=q_len, q_block=q_block, kv_block=kv_block
    )


@st.composite
def two_selections(draw: st.DrawFn) -> tuple[fs.Selection, fs.Selection]:
    q_len, kv_len = draw(st.integers(1, 9)), draw(st.integers(1, 21))
    return draw(selections(q_len, kv_len)), draw(selections(q_len, kv_len))


def as_sets(s: fs.Selection, batch: int, heads: int) -> list[set[int]]:
    """The positions of each (batch, head, query), read from the indices by hand."""
    found = []
    for b in range(batch):
        for h in range(heads):
            for q in range(s.q_len):
                row = s.indices[
                    b * s.indices.shape[0] // batch, h * s.indices.shape[1] // heads, q // s.q_block
                ]
                found.append(
                    {
                        p
                        for c in row.tolist()
                        if c >= 0
                        for p in range(c * s.kv_block, min((c + 1) * s.kv_block, s.kv_len))
                    }
                )
    return found


@given(two_selections())
@HYPOTHESIS
def test_union_and_intersection_are_those_of_sets(pair: tuple[fs.Selection, fs.Selection]) -> None:
    """Over any blocks, heads and batches; the result is unique, rising and padded with -1."""
    a, b = pair
    batch = max(a.indices.shape[0], b.indices.shape[0])
    heads = max(a.heads, b.heads)
    left, right = as_sets(a, batch, heads), as_sets(b, batch, heads)
    for joined, wanted in (
        (a | b, [x | y for x, y in zip(left, right, strict=True)]),
        (b | a, [x | y for x, y in zip(left, right, strict=True)]),
        (a & b, [x & y for x, y in zip(left, right, strict=True)]),
        (b & a, [x & y for x, y in zip(left, right, strict=True)]),
    ):
        assert as_sets(joined, batch, heads) == wanted
        for row in joined.indices.flatten(0, 2).tolist():
            used = [c for c in row if c >= 0]
            assert row == sorted(set(used)) + [-1] * (len(row) - len(used))
    assert as_sets(a | a, batch, heads) == left
    assert as_sets(a & a, batch, heads) == left


@given(two_selections())
@HYPOTHESIS
def test_dense_and_refine_keep_the_pairs(pair: tuple[fs.Selection, fs.Selection]) -> None:
    """A selection in smaller blocks, and as a bool map, names the same pairs."""
    for s in pair:
        batch, heads = s.indices.shape[:2]
        wanted = as_sets(s, batch, heads)
        assert as_sets(s.refine(q_block=1, kv_block=1), batch, heads) == wanted
        rows = s.dense().expand(batch, heads, -1, -1).flatten(0, 2)
        assert [set(row.nonzero()[:, 0].tolist()) for row in rows] == wanted
        counted = sum(len(x) for x in wanted)
        assert int(s.refine(q_block=1, kv_block=1).counts.sum()) == counted


@given(two_selections())
@HYPOTHESIS
def test_attention_over_both_is_attention_over_the_set(
    pair: tuple[fs.Selection, fs.Selection],
) -> None:
    """Union and intersection reach the kernel as sets: no key counts twice."""
    a, b = pair
    draw = torch.Generator().manual_seed(a.q_len * 100 + a.kv_len)
    q = torch.randn(2, 4, a.q_len, 8, generator=draw)
    k, v = (torch.randn(2, 2, a.kv_len, 8, generator=draw) for _ in range(2))
    for joined, sets in ((a | b, set.union), (a & b, set.intersection)):
        both = [sets(x, y) for x, y in zip(as_sets(a, 2, 4), as_sets(b, 2, 4), strict=True)]
        seen = torch.zeros(len(both), a.kv_len, dtype=torch.bool)
        for row, keys in zip(seen, both, strict=True):
            row[list(keys)] = True
        got = fs.attention(q, k, v, select=joined, tile=16, return_lse=True)
        close(got, dense(q, k, v, seen.view(2, 4, a.q_len, a.kv_len)))


@pytest.mark.parametrize("size", [7, 65])
def test_rules_obey_the_algebra_of_sets(size: int) -> None:
    """De Morgan, double negation, absorption, distribution: as layouts, not only as functions."""
    a = SlidingWindow(5)
    b = fs.MaskRule.of(lambda b, h, q, kv: kv % 3 == 0)
    c = Causal()

    def seen(rule: fs.MaskRule) -> Tensor:
        grid = fs.Grid(size, size)
        return fs.build_layout(rule=rule, grid=grid, heads=(2, 1), block_size=16).dense()

    assert torch.equal(seen(~(a | b)), seen(~a & ~b))
    assert torch.equal(seen(~(a & b)), seen(~a | ~b))
    assert torch.equal(seen(~~a), seen(a))
    assert torch.equal(seen(a | (a & b)), seen(a))
    assert torch.equal(seen((a | b) & c), seen((a & c) | (b & c)))
    assert torch.equal(seen(a | ~a), torch.ones(1, 2, size, size, dtype=torch.bool))
    assert not bool(seen(a & ~a).any())
    assert torch.equal(seen(a), seen(c) & ~seen(fs.MaskRule.of(lambda b, h, q, kv: q - kv >= 5)))
