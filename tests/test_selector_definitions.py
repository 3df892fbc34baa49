"""Published selectors against their definitions, query by query in fp64."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from naive_selectors import (
    DIM,
    HEADS,
    INPUTS,
    KV_HEADS,
    LENGTHS,
    SHARING,
    attention,
    by_blocks,
    drawn,
    exponentials,
    kept,
    lists_of,
    positions,
    rows_of,
    sets,
)
from torch import Tensor

import flexsparse as fs
import flexsparse.selectors
from flexsparse.masks import Causal
from flexsparse.selectors import (
    H2O,
    Mass,
    MeanPooled,
    OracleTopK,
    OracleTopP,
    Quest,
    SnapKV,
    StreamingLLM,
)

OFFSETS = [None, torch.tensor([0, 3])]


def equal_or_tied(got: set[int], score: dict[int, float], want: set[int]) -> None:
    """The same set, but where rounding decides between equals."""
    assert len(got) == len(want) and got <= score.keys()
    near = 1e-5 * max(1.0, *(abs(s) for s in score.values())) if score else 0.0
    gone, come = (sorted(score[c] for c in x) for x in (want - got, got - want))
    for a, b in zip(gone, come, strict=True):
        assert abs(a - b) <= near


def block_bound(kind: type[fs.Selector], q: Tensor, page: Tensor) -> float:
    q, page = q.double(), page.double()
    if kind is Quest:
        bound = torch.maximum(q * page.amin(0), q * page.amax(0)).sum()
        assert bound >= (page @ q).max() - 1e-9 * bound.abs()
        return float(bound) / DIM**0.5
    return float(page.mean(0) @ q) / DIM**0.5


@pytest.mark.parametrize("kind", [Quest, MeanPooled])
@pytest.mark.parametrize("drawing", INPUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_summaries_of_blocks(lengths: tuple[int, int], drawing: str, kind: Any) -> None:
    q, k = drawn(drawing, *lengths)
    for heads, block, q_block, keep, offset in (
        ("shared", 16, 16, 2, None),
        ("kv", 16, 64, Mass(0.6), OFFSETS[1]),
        ("query", 64, 1 if lengths[0] < 64 else 16, 0.5, None),
    ):
        grid = fs.Grid(*lengths, q_offset=offset, batch=2)
        chosen = kind(heads=heads, block=block, q_block=q_block, keep=keep).select(
            q, k, grid, Causal()
        )

        known: dict[Any, float] = {}

        def scored(b: int, h: int, keys: range, i: int, known: dict[Any, float] = known) -> float:
            if (b, h, keys, i) not in known:
                page = k[b, h // 2, keys.start : keys.stop]
                known[b, h, keys, i] = block_bound(kind, q[b, h, i], page)
            return known[b, h, keys, i]

        want = by_blocks(q, k, grid, heads, block, q_block, scored)
        for b, lists in enumerate(sets(chosen)):
            for h, rows in enumerate(lists):
                for r, row in enumerate(rows):
                    score = want[b][h][r]
                    best = set(kept(score, keep, exponentials(score) if score else {}))
                    if drawing in ("tied", "constant"):
                        # Their numbers are exact, but for the mean of three.
                        assert kind is MeanPooled or row == best
                    equal_or_tied(row, score, best)


@pytest.mark.parametrize("drawing", INPUTS)
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (65, 65), (5, 100)])
def test_oracles(lengths: tuple[int, int], drawing: str) -> None:
    q, k = drawn(drawing, *lengths)
    for heads, (block, q_block), offset in zip(
        SHARING, ((1, 1), (16, 7), (7, 64)), (None, *OFFSETS), strict=True
    ):
        grid = fs.Grid(*lengths, q_offset=offset, batch=2)
        weights = [
            [
                [
                    attention(q[b, h, i], k[b, h // 2], list(range(min(p + 1, lengths[1]))))
                    for i, p in enumerate(positions(grid, b))
                ]
                for h in range(HEADS)
            ]
            for b in range(2)
        ]
        for selector in (
            OracleTopK(heads=heads, block=block, q_block=q_block, keep=3),
            OracleTopP(heads=heads, block=block, q_block=q_block, keep=Mass(0.8137)),
        ):
            chosen = sets(selector.select(q, k, grid, Causal()))
            for b in range(2):
                for h, own in enumerate(lists_of(heads)):
                    for r, row in enumerate(rows_of(lengths[0], q_block)):
                        score: dict[int, float] = {}
                        for weight in (weights[b][x][i] for x in own for i in row):
                            for s, w in weight.items():
                                score[s // block] = score.get(s // block, 0.0) + w
                        best = set(kept(score, selector.keep, score))
                        equal_or_tied(chosen[b][h][r], score, best)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_streaming_llm(lengths: tuple[int, int]) -> None:
    q, k = drawn("random", *lengths)
    for block, q_block, sinks, window, offset in (
        (1, 1, 4, 20, None),
        (1, 1, 0, 1, OFFSETS[1]),
        (16, 7, 5, 30, OFFSETS[1]),
        (7, 64, 1, 64, None),
    ):
        grid = fs.Grid(*lengths, q_offset=offset, batch=2)
        selector = StreamingLLM(block=block, q_block=q_block, sinks=sinks, window=window)
        for rule in (Causal(), None):
            chosen = selector.select(q, k, grid, rule)
            assert chosen.indices.shape[-1] <= selector.keep
            for b, lists in enumerate(sets(chosen)):
                p = positions(grid, b)
                for r, row in enumerate(rows_of(lengths[0], q_block)):
                    want = {
                        s // block
                        for i in row
                        for s in range(min(p[i] + 1, lengths[1]))
                        if s < sinks or p[i] - s < window
                    }
                    assert lists[0][r] == want


def heavy_hitters(
    selector: H2O, q: Tensor, k: Tensor, p: list[int], own: list[int]
) -> list[tuple[set[int], dict[int, float]]]:
    """One list's sets, query by query, as H2O has it: evict, attend, add up."""
    mass: dict[int, float] = {}
    there: set[int] = set()
    met = 0
    found = []
    for i, position in enumerate(p):
        there |= set(range(met, min(position + 1, len(k[0]))))
        met = max(met, position + 1)
        old = {s: mass.get(s, 0.0) for s in there if s <= position - selector.recent}
        before = {s: mass.get(s, 0.0) for s in there}
        best = sorted(old, key=lambda s: (-old[s], s))
        best = best[: selector.heavy + selector.recent - (len(there) - len(old))]
        there = (there - old.keys()) | set(best)
        found.append((set(there), before))
        for h in own:
            for s, w in attention(q[h, i], k[h // 2], sorted(there)).items():
                mass[s] = mass.get(s, 0.0) + w
    return found


@pytest.mark.parametrize("drawing", INPUTS)
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (63, 63), (65, 65), (5, 100)])
def test_h2o(lengths: tuple[int, int], drawing: str) -> None:
    q, k = drawn(drawing, *lengths)
    offset = torch.tensor([0, 2]) if lengths == (63, 63) else None
    grid = fs.Grid(*lengths, q_offset=offset, batch=2)
    for heads, heavy, recent in (("query", 4, 4), ("kv", 3, 1), ("shared", 0, 8)):
        selector = H2O(heavy=heavy, recent=recent, heads=heads)
        chosen = selector.select(q, k, grid, Causal())
        assert chosen.indices.shape[-1] <= heavy + recent
        for b, lists in enumerate(sets(chosen)):
            for h, own in enumerate(lists_of(heads)):
                gone: set[int] = set()
                want = heavy_hitters(selector, q[b], k[b], positions(grid, b), own)
                for i, (row, (true, mass)) in enumerate(zip(lists[h], want, strict=True)):
                    equal_or_tied(row, mass, true)
                    assert not row & gone
                    gone |= set(range(min(positions(grid, b)[i] + 1, lengths[1]))) - row
                    if row != true:  # a tie that rounding broke: the histories part here
                        assert drawing in ("tied", "constant")
                        break


@pytest.mark.parametrize("drawing", INPUTS)
@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("heads", SHARING)
def test_snap_kv(heads: Any, pooling: Any, drawing: str) -> None:
    for prompt, kv_len, window, prefix, offset in (
        (1, 7, 4, 3, None),
        (63, 65, 8, 5, torch.tensor([0, 2])),
        (64, 64, 8, 200, None),
        (40, 65, 40, 5, None),
    ):
        q, k = drawn(drawing, kv_len, kv_len)
        grid = fs.Grid(kv_len, kv_len, q_offset=offset, batch=2)
        selector = SnapKV(
            prompt=prompt, prefix=prefix, window=window, kernel=3, pooling=pooling, heads=heads
        )
        chosen = selector.select(q, k, grid, Causal())
        start = max(prompt - window, 0)
        for b, lists in enumerate(sets(chosen)):
            p = positions(grid, b)
            for h, own in enumerate(lists_of(heads)):
                score = dict.fromkeys(range(start), 0.0)
                for x in own:
                    votes = [0.0] * start
                    for at in range(start, prompt):
                        weight = attention(q[b, x, p.index(at)], k[b, x // 2], list(range(at + 1)))
                        votes = [v + weight[s] for s, v in enumerate(votes)]
                    for s in score:
                        near = [votes[s + d] for d in (-1, 0, 1) if 0 <= s + d < start]
                        score[s] += max(near) if pooling == "max" else sum(near) / 3
                best = set(kept(score, prefix, {}))
                for i, row in enumerate(lists[h]):
                    if p[i] < prompt:
                        assert row == set(range(p[i] + 1))
                        continue
                    since = set(range(start, min(p[i] + 1, kv_len)))
                    assert since <= row
                    equal_or_tied(row - since, score, best)


def test_what_a_selector_chooses_is_attended_to_exactly() -> None:
    q, k = drawn("random", 65, 65)
    v = k.flip(-1).contiguous()
    for selector in (
        H2O(heavy=4, recent=4),
        SnapKV(prompt=40, prefix=4, window=4),
        StreamingLLM(sinks=2, window=9, block=1, q_block=1),
        MeanPooled(block=8, keep=Mass(0.7), q_block=8),
        OracleTopP(block=8, q_block=8, keep=(Mass(0.5), 0.3)),
    ):
        assert fs.check(q, k, v, rule=Causal(), select=selector).ok


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: H2O(recent=0), "H2O recent must be at least 1"),
        (lambda: H2O(heads="all"), "H2O heads must be 'shared', 'kv' or 'query'"),
        (lambda: StreamingLLM(window=0), "StreamingLLM window must be at least 1"),
        (lambda: SnapKV(prompt=8, kernel=4), "SnapKV kernel must be odd, got 4"),
        (lambda: SnapKV(prompt=8, pooling="sum"), "SnapKV pooling must be 'mean' or 'max'"),  # type: ignore[arg-type]
        (
            lambda: SnapKV(prompt=8, window=4).select(
                *drawn("random", 2, 8), fs.Grid(2, 8, batch=2)
            ),
            "needs the queries at positions 4 to 7 at first",
        ),
        (
            lambda: SnapKV(prompt=9).select(*drawn("random", 8, 8), fs.Grid(8, 8, batch=2)),
            "the 9 keys of its prompt or more, got 8",
        ),
    ],
)
def test_wrong_uses(wrong: Any, words: str) -> None:
    with pytest.raises(fs.FlexSparseError, match=words):
        wrong()


@pytest.mark.parametrize("name", [m.name for m in iter_modules(flexsparse.selectors.__path__)])
def test_examples_in_docstrings(name: str) -> None:
    module = import_module(f"flexsparse.selectors.{name}")
    assert doctest.testmod(module).failed == 0


def test_heads_of_these_tests() -> None:
    assert HEADS // KV_HEADS == 2 and [len(lists_of(heads)) for heads in SHARING] == [1, 2, 4]
