"""Pruning what another selector chose, held against its definition, token by token."""

from __future__ import annotations

import math
from typing import Any

import prefill_definitions as defined
import pytest
import torch
from test_prefill_selectors import (
    BATCH,
    KINDS,
    LENGTHS,
    Head,
    agree,
    causal,
    heads_of,
    inputs,
    rows_of,
)

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.selectors import OracleTopK, Quest, Random, Twilight, XAttention

BASES: dict[str, Any] = {
    "quest": lambda: Quest(block=16, q_block=8, keep=3),
    "per-head": lambda: XAttention(block=16, q_block=8, stride=4, tau=0.9),
    "shared": lambda: Random(block=16, q_block=8, keep=4, heads="shared"),
}


def weights(
    head: Head, chosen: list[int], row: range, block: int, at: int, bits: int | None
) -> dict[int, float]:
    """What each candidate of a row weighs: a softmax over the keys of all of them, summed over queries."""
    keys = head.k if bits is None else defined.rounded(head.k, bits)
    scores = defined.products(head.q, keys)
    inside = [j for c in chosen for j in range(c * block, min((c + 1) * block, len(head.k)))]
    mass = dict.fromkeys(chosen, 0.0)
    for i in row:
        line = defined.softmax([scores[i][j] for j in inside], [j <= at + i for j in inside])
        for j, x in zip(inside, line, strict=True):
            mass[j // block] += x
    return mass


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("q_block", "block", "bits", "base"),
    [(1, 1, 4, "quest"), (8, 16, None, "per-head"), (4, 8, 2, "shared")],
    ids=str,
)
def test_it_keeps_the_fewest_that_hold_the_mass(
    q_block: int, block: int, bits: int | None, base: str, kind: str, lengths: tuple[int, int]
) -> None:
    q, k = inputs(kind, *lengths)
    at, grid = lengths[1] - lengths[0], fs.Grid(*lengths, batch=BATCH)
    selector = Twilight(
        base=BASES[base](), mass=0.837, bits=bits, heads="query", q_block=q_block, block=block
    )
    pruned = selector.select(q, k, grid, Causal())
    given = BASES[base]().select(q, k, grid, Causal()).refine(q_block=q_block, kv_block=block)
    for head in heads_of(q, k):
        candidates, got = rows_of(given, head), rows_of(pruned, head)
        for r, row in enumerate(defined.blocks(lengths[0], q_block)):
            if lengths[0] == 200 and r % 7:
                continue
            chosen = sorted(candidates[r])
            mass = weights(head, chosen, row, block, at, bits)
            places = defined.cover([mass[c] for c in chosen], 0.837)
            want = {chosen[p] for p in places}
            assert agree(got[r], want, mass), (head.b, head.h, r)
            assert got[r] or not any(causal(at)(i, j) for i in row for j in range(lengths[1]))


@pytest.mark.parametrize(("heads", "lists"), [("query", 4), ("kv", 2), ("shared", 1)])
@pytest.mark.parametrize("base", BASES)
def test_a_group_gets_what_any_of_its_heads_kept(base: str, heads: Any, lists: int) -> None:
    q, k = inputs("random", 7, 65)
    grid = fs.Grid(7, 65, batch=BATCH)
    alone = Twilight(base=BASES[base](), mass=0.5, heads="query").select(q, k, grid, Causal())
    joined = Twilight(base=BASES[base](), mass=0.5, heads=heads).select(q, k, grid, Causal())
    assert joined.heads == lists
    each = {(x.b, x.h): rows_of(alone, x) for x in heads_of(q, k)}
    for head in heads_of(q, k):
        group = [h for h in range(4) if h * lists // 4 == head.h * lists // 4]
        want = [set().union(*(each[head.b, h][r] for h in group)) for r in range(7)]
        assert rows_of(joined, head) == want


def test_the_share_is_of_what_the_base_chose_and_the_crossing_one_is_kept() -> None:
    """Eight equal tokens: half of them is four, a hair more is five, and the lower ones."""
    q = k = torch.zeros(1, 1, 16, 4)
    base = Quest(block=8, q_block=1, keep=1)
    for mass, count in ((0.5, 4), (0.5001, 5), (1.0, 8)):
        chosen = Twilight(base=base, mass=mass).select(q[:, :, :1], k, fs.Grid(1, 16))
        assert chosen.indices[0, 0, 0].tolist()[:count] == list(range(count))
        assert chosen.counts.item() == count


@pytest.mark.parametrize("share", [0.3, 0.85, 0.99])
def test_attention_that_is_kept_is_the_share_asked_for(share: float) -> None:
    """With keys as they are, over all of them: each head keeps its mass, and not a key more."""
    q, k = inputs("random", 1, 200)
    everything = OracleTopK(block=8, q_block=1, keep=1000)
    chosen = Twilight(base=everything, mass=share, bits=None, heads="query").select(
        q, k, fs.Grid(1, 200, batch=BATCH), Causal()
    )
    for head in heads_of(q, k):
        (line,) = defined.sampled(head.q, head.k, 1, causal(199), 199).values()
        kept = [line[c] for c in rows_of(chosen, head)[0]]
        assert math.fsum(kept) >= share - 1e-12
        assert math.fsum(kept) - min(kept) < share


def test_rounded_keys_change_the_choice() -> None:
    q, k = inputs("random", 1, 200)
    grid = fs.Grid(1, 200, batch=BATCH)
    exact, coarse = (Twilight(bits=b).select(q, k, grid).indices for b in (None, 1))
    assert exact.shape == coarse.shape and not torch.equal(exact, coarse)


def test_in_chunks_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = inputs("random", 65, 65)
    grid = fs.Grid(65, 65, batch=BATCH)
    whole = Twilight(base=BASES["quest"]()).select(q, k, grid, Causal())
    monkeypatch.setattr("flexsparse.selectors.twilight._AT_ONCE", 1)
    assert torch.equal(
        Twilight(base=BASES["quest"]()).select(q, k, grid, Causal()).indices, whole.indices
    )


def test_a_rule_of_each_head_and_batch_is_asked_as_it_is() -> None:
    q, k = inputs("random", 7, 65)
    grid = fs.Grid(7, 65, batch=BATCH)
    rule = fs.MaskRule.of(lambda b, h, q, kv: (kv <= q) & ((kv + h + 3 * b) % 4 != 0))
    chosen = Twilight(base=Random(block=8, q_block=1, keep=99), heads="query", mass=1.0).select(
        q, k, grid, rule
    )
    for head in heads_of(q, k):
        want = [
            {j for j in range(65) if j <= 58 + i and (j + head.h + 3 * head.b) % 4 != 0}
            for i in range(7)
        ]
        assert rows_of(chosen, head) == want


@pytest.mark.parametrize("lengths", [(65, 65), (7, 200), (65, 20)], ids=str)
def test_attention_over_what_is_kept(lengths: tuple[int, int]) -> None:
    q, k = (x.float() for x in inputs("random", *lengths))
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(5))
    select = Twilight(base=BASES["quest"]())
    report = fs.check(q, k, v, rule=Causal(), select=select, tile=16, grads=True)
    assert report.ok, report.table()


def test_what_cannot_be_is_refused() -> None:
    for given, said in (
        ({"mass": 0.0}, "mass must be above 0"),
        ({"bits": 0}, "bits must be at least 1"),
        ({"base": 3}, "base must be a selector"),
        ({"block": 3}, "block must divide that of its base, got 3 and 16"),
        ({"q_block": 2}, "q_block must divide that of its base, got 2 and 1"),
    ):
        with pytest.raises(fs.FlexSparseError, match=said):
            Twilight(**given)
