"""Published selectors against their definitions, query by query: equal sets on every kind of input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from selector_definitions import (
    Row,
    exact_choice,
    infllm_v2,
    moba,
    msa,
    nsa,
    right_choice,
    sparge,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexsparse as fs
from flexsparse.kernels.parts import PAIRS_AT_ONCE
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.selectors import MSA, NSA, InfLLMv2, MoBA, SpargeAttn

HQ, HKV, DIM = 4, 2, 8
SHARING = {"query": [[0], [1], [2], [3]], "kv": [[0, 1], [2, 3]], "shared": [[0, 1, 2, 3]]}
LENGTHS = [(1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (1, 200), (7, 65), (23, 200), (65, 63)]
KINDS = ["random", "tied", "constant", "adversarial"]


def inputs(kind: str, q_len: int, kv_len: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """fp64 ``q [batch, Hq, Q, D]`` and ``k [batch, Hkv, S, D]``."""
    draw = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    shapes = [(batch, HQ, q_len, DIM), (batch, HKV, kv_len, DIM)]
    if kind == "random":
        return tuple(torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    if kind == "tied":
        return tuple(torch.randint(-1, 2, s, generator=draw).double() for s in shapes)
    if kind == "constant":
        return tuple(torch.ones(s, dtype=torch.float64) for s in shapes)
    q, k = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    # One key outweighs all, the last ones beyond whole windows and blocks are huge, some are 0.
    k[:, :, kv_len // 3] *= 1e3
    k[:, 1, -3:] = 50.0
    k[:, 0, kv_len // 2 :: 5] = 0.0
    q[:, :, ::4] = 0.0
    q[:, 2] = -q[:, 2].abs()
    return q, k


def rows(
    select: fs.Selection, q: Tensor, k: Tensor, lists: list[list[int]], offset: int | None = None
) -> Iterator[tuple[set[int], Row, int, int]]:
    """What each list of each row holds, with what it is about: (got, row, sequence, list)."""
    q_len, kv_len = q.shape[2], k.shape[2]
    first = kv_len - q_len if offset is None else offset
    assert select.heads == len(lists)
    for b in range(q.shape[0]):
        for at, heads in enumerate(lists):
            for r in range(select.rows):
                queries = list(range(r * select.q_block, min((r + 1) * select.q_block, q_len)))
                got = set(select.indices[b, at, r].tolist()) - {-1}
                positions = [first + t for t in queries]
                yield got, Row(q[b], k[b], heads, queries, positions, select.kv_block), b, at


Case = tuple[int, int]
CASES = [(lengths, kind) for lengths in LENGTHS for kind in KINDS] + [((200, 200), "random")]
each_case = pytest.mark.parametrize(
    ("lengths", "kind"), CASES, ids=[f"{q}x{s}-{kind}" for (q, s), kind in CASES]
)
each_sharing = pytest.mark.parametrize("heads", SHARING)


@each_case
@each_sharing
def test_moba(lengths: Case, kind: str, heads: str) -> None:
    q, k = inputs(kind, *lengths, batch=1)
    for keep, q_block in ((1, 1), (3, 1), (3, 24)):
        selector = MoBA(block=16, keep=keep, q_block=q_block, heads=heads)
        select = selector.select(q, k, fs.Grid(*lengths), Causal())
        right = exact_choice if kind in ("tied", "constant") else right_choice
        for got, row, _, _ in rows(select, q, k, SHARING[heads]):
            right(got, moba(row), row.past, row.near(0, 1), keep)
            assert got or not row.past


@each_case
@pytest.mark.parametrize("alignment", ["overlap", "paper"])
def test_nsa(lengths: Case, kind: str, alignment: str) -> None:
    q, k = inputs(kind, *lengths, batch=1)
    for heads, q_block, (length, stride, block) in (
        ("kv", 1, (8, 4, 16)), ("shared", 5, (8, 4, 16)), ("query", 1, (8, 2, 8)), ("kv", 1, (8, 8, 8)),
    ):  # fmt: skip
        selector = NSA(
            length=length, stride=stride, block=block, keep=5, q_block=q_block, heads=heads,
            alignment=alignment,
        )  # fmt: skip
        select = selector.select(q, k, fs.Grid(*lengths), Causal())
        for got, row, _, _ in rows(select, q, k, SHARING[heads]):
            worth = nsa(row, length, stride, alignment)
            right_choice(got, worth, row.past, row.near(1, 2), 5)
            assert got or not row.past


def test_the_two_alignments_of_nsa_differ_and_the_published_weights_are_met() -> None:
    """l = 32, d = 16, l' = 64: kernels weigh 1 2 2 2 1 from window 4j - 1; the paper ends at 4j."""
    mass = torch.zeros(1, 1, 1, 15)
    mass[..., 6] = 1.0
    shown = {}
    for alignment in ("overlap", "paper"):
        selector = NSA(alignment=alignment)
        q = torch.zeros(1, 1, 1, 4)
        # Keys such that one query sees window i alone.
        for window in range(15):
            compressed = torch.zeros(1, 1, 15, 4)
            compressed[:, :, window, 0] = 1e4
            q[..., 0] = 1.0
            worth = selector.importance(q, compressed, fs.Grid(1, 256))
            shown.setdefault(alignment, []).append(worth.flatten().tolist())
    by_block = {name: torch.tensor(worth).mT for name, worth in shown.items()}
    assert by_block["overlap"][1].tolist() == [0.0] * 3 + [1, 2, 2, 2, 1] + [0.0] * 7
    assert by_block["paper"][1].tolist() == [1, 2, 2, 2, 1] + [0.0] * 10


@each_case
@pytest.mark.parametrize("own_block", ["beside", "among"])
def test_infllm_v2(lengths: Case, kind: str, own_block: str) -> None:
    q, k = inputs(kind, *lengths, batch=1)
    for heads, q_block in (("kv", 1), ("shared", 5), ("query", 1)):
        selector = InfLLMv2(
            length=8, stride=4, block=16, keep=5, local=2, q_block=q_block, heads=heads,
            own_block=own_block,
        )  # fmt: skip
        select = selector.select(q, k, fs.Grid(*lengths), Causal())
        for got, row, _, _ in rows(select, q, k, SHARING[heads]):
            forced = row.near(1, 3 if own_block == "beside" else 2)
            right_choice(got, infllm_v2(row, 8, 4), row.past, forced, 5)
            assert got or not row.past


def test_infllm_v2_is_dense_below_its_length() -> None:
    q, k = inputs("random", 65, 65)
    grid = fs.Grid(65, 65, batch=2)
    made = {"block": 16, "length": 8, "stride": 4, "keep": 2, "local": 1}
    assert int(InfLLMv2(**made, dense_len=65).select(q, k, grid, Causal()).counts.max()) == 2
    dense = InfLLMv2(**made, dense_len=66).select(q, k, grid, Causal())
    assert torch.equal(dense.counts[0, 0], torch.arange(65) // 16 + 1)


@each_case
@pytest.mark.parametrize("learned", [False, True])
def test_msa(lengths: Case, kind: str, learned: bool) -> None:
    q, k = inputs(kind, *lengths, batch=1)
    draw = torch.Generator().manual_seed(0)
    maps: dict[str, Any] = {}
    index_q, index_k = q.unflatten(1, (HKV, -1)).mean(2), k
    if learned:
        to_q = torch.randint(-2, 3, (HKV, 2 * DIM, 4), generator=draw).double()
        to_k = torch.randint(-2, 3, (HKV * DIM, 4), generator=draw).double()
        maps = {"query": to_q, "key": to_k}
        index_q = torch.stack(
            [torch.cat([q[:, 2 * g], q[:, 2 * g + 1]], -1) @ to_q[g] for g in (0, 1)], 1
        )
        index_k = (torch.cat([k[:, 0], k[:, 1]], -1) @ to_k)[:, None].expand(-1, 2, -1, -1)
    for first, local, q_block in ((0, 1, 1), (1, 2, 1), (0, 1, 24)):
        selector = MSA(block=16, keep=4, first=first, local=local, q_block=q_block, **maps)
        select = selector.select(q, k, fs.Grid(*lengths), Causal())
        right = exact_choice if kind in ("tied", "constant") else right_choice
        for got, row, b, g in rows(select, q, k, SHARING["kv"]):
            worth = msa(row, index_q[b, g], index_k[b, g])
            right(got, worth, row.past, row.near(first, local), 4)
            assert got or not row.past


@each_case
@each_sharing
def test_sparge_attn(lengths: Case, kind: str, heads: str) -> None:
    q, k = inputs(kind, *lengths, batch=1)
    for options in (
        {"mass": 0.8312345}, {"mass": 0.8312345, "similarity": 0.02, "first": 1},
        {"mass": None, "share": 0.37, "similarity": -0.1}, {"mass": None, "share": 0.1, "similarity": 0.02},
    ):  # fmt: skip
        selector = SpargeAttn(block=8, q_block=16, heads=heads, **options)
        select = selector.select(q, k, fs.Grid(*lengths), Causal())
        asked = {"mass": None, "share": None, "similarity": 0.1, "first": 0} | options
        for got, row, _, _ in rows(select, q, k, SHARING[heads]):
            kept = [sparge(row, h, **asked) for h in row.heads]
            assert set().union(*(one.sure for one in kept)) <= got
            assert got <= set().union(*(one.maybe for one in kept))
            assert got or not row.past


def test_sparge_attn_keeps_within_its_mass_and_never_less_than_one() -> None:
    """Four equal blocks: the one that would cross the mass stays out; without any left one is kept."""
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 8, 4)
    kept = [
        SpargeAttn(block=2, mass=mass).select(q, k, fs.Grid(1, 8)).indices.flatten().tolist()
        for mass in (0.0, 0.2, 0.6, 0.9)
    ]
    assert kept == [[0, -1, -1, -1], [0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]
    capped = SpargeAttn(block=2, mass=0.9, keep=2).select(q, k, fs.Grid(1, 8))
    assert capped.indices.flatten().tolist() == [0, 1]


def made(kind: type[fs.Selector]) -> fs.Selector:
    small: dict[type, Callable[[], fs.Selector]] = {
        MoBA: lambda: MoBA(block=64, keep=3),
        NSA: lambda: NSA(keep=4),
        InfLLMv2: lambda: InfLLMv2(keep=6, local=2),
        MSA: lambda: MSA(keep=3),
        SpargeAttn: lambda: SpargeAttn(q_block=16),
    }
    return small[kind]()


each_selector = pytest.mark.parametrize("kind", [MoBA, NSA, InfLLMv2, MSA, SpargeAttn])


@each_selector
def test_attention_over_what_was_selected(kind: type[fs.Selector]) -> None:
    q, k = inputs("random", 65, 200)
    v = torch.randn(2, HKV, 200, DIM, generator=torch.Generator().manual_seed(1)).double()
    report = fs.check(q, k, v, rule=Causal(), select=made(kind), grads=True, rows=24)
    assert report.ok, report


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@each_selector
def test_no_tensor_of_all_pairs(kind: type[fs.Selector], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows at once give the same choice, and nothing is larger than rows times candidates."""
    length = 2048
    q, k = (x[:1].float() for x in inputs("random", length, length))
    grid = fs.Grid(length, length)
    whole = made(kind).select(q, k, grid, Causal())
    monkeypatch.setitem(PAIRS_AT_ONCE, "cpu", 2**15)
    with Largest() as seen:
        select = made(kind).select(q, k, grid, Causal())
    assert torch.equal(select.indices, whole.indices)
    # int64 places of every candidate of every row and head, and no more.
    assert seen.bytes <= length * (length // 64) * HQ * 8 < length * length


@each_selector
def test_compiled_around_a_call(kind: type[fs.Selector]) -> None:
    q, k = inputs("random", 65, 200)
    selector, rule = made(kind), Causal()

    def call(q: Tensor, k: Tensor) -> Tensor:
        return fs.attention(q, k, k, rule=rule, select=selector)

    # Of selectors with other blocks through one function, the sizes would be made symbols.
    whole = torch.compile(call, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(whole(q, k), call(q, k))


@each_selector
def test_positions_of_each_sequence(kind: type[fs.Selector]) -> None:
    """A sequence of its own offset chooses as if it were alone; half precision is ranked in fp32."""
    q, k = (x.bfloat16() for x in inputs("tied", 33, 200))
    together = made(kind).select(
        q, k, fs.Grid(33, 200, q_offset=torch.tensor([3, 150]), batch=2), Causal()
    )
    for b, offset in enumerate((3, 150)):
        one = slice(b, b + 1)
        alone = made(kind).select(
            q[one].float(), k[one].float(), fs.Grid(33, 200, q_offset=offset), Causal()
        )
        assert torch.equal(together.indices[one], alone.indices)


@each_selector
def test_the_rule_may_hide_more(kind: type[fs.Selector]) -> None:
    q, k = inputs("random", 65, 200)
    grid = fs.Grid(65, 200, batch=2)
    select = made(kind).select(q, k, grid, SlidingWindow(20))
    first = (grid.positions()[0] - 19).clamp(min=0) // select.kv_block
    lowest = first[:: select.q_block][:, None]
    assert bool(((select.indices >= lowest) | (select.indices < 0)).all())
    assert bool((select.counts > 0).all())


@pytest.mark.gpu
@each_selector
def test_every_device_selects_the_same(kind: type[fs.Selector]) -> None:
    q, k = inputs("random", 65, 200)
    grid = fs.Grid(65, 200, batch=2)
    there = made(kind).select(q.cuda(), k.cuda(), grid, Causal())
    assert torch.equal(there.indices.cpu(), made(kind).select(q, k, grid, Causal()).indices)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: MoBA(heads="groups"), "MoBA heads"),
        (lambda: NSA(length=24), "NSA length must be a multiple of stride 16, got 24"),
        (lambda: NSA(block=40), "NSA block must be a multiple of stride 16, got 40"),
        (lambda: NSA(local=0), "NSA local must be at least 1"),
        (lambda: NSA(alignment="code"), "'overlap' or 'paper'"),
        (lambda: InfLLMv2(own_block="in"), "'beside' or 'among'"),
        (lambda: InfLLMv2(dense_len=-1), "dense_len must be at least 0"),
        (lambda: MSA(query=torch.zeros(2, 8, 4)), "give both, or neither"),
        (lambda: MSA(query=torch.zeros(2, 8), key=torch.zeros(8, 4)), "MSA query must be a float"),
        (lambda: SpargeAttn(share=0.5), "either mass or share"),
        (lambda: SpargeAttn(mass=None), "either mass or share"),
        (lambda: SpargeAttn(mass=1.5), "mass must be at most 1"),
    ],
)
def test_a_wrong_argument_is_named(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(fs.FlexSparseError, match=message):
        wrong()


def test_a_call_of_other_lengths_than_its_grid_is_named() -> None:
    q, k = inputs("random", 7, 7)
    for wrong, message in (
        (lambda: NSA().select(q, k, fs.Grid(6, 7, batch=2)), r"must be Grid\(7, 7, batch=2\)"),
        (lambda: NSA().select(q, k, fs.Grid(7, 9, batch=2)), r"must be Grid\(7, 7, batch=2\)"),
        (lambda: NSA().select(q[:, :3], k, fs.Grid(7, 7, batch=2)), "3 query heads over 2 KV"),
        (lambda: NSA().select(q, k, (7, 7)), "got tuple"),  # type: ignore[arg-type]
        (lambda: NSA().select(q, k[0], fs.Grid(7, 7, batch=2)), "k must have 4 axes"),
    ):
        with pytest.raises(fs.FlexSparseError, match=message):
            wrong()


def test_maps_of_another_size_are_named() -> None:
    q, k = inputs("random", 7, 7)
    selector = MSA(query=torch.zeros(2, 8, 4), key=torch.zeros(16, 4))
    with pytest.raises(fs.FlexSparseError, match=r"MSA query must be \[2, 16, 4\]"):
        selector.select(q, k, fs.Grid(7, 7, batch=2))
