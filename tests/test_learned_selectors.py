"""Selectors with weights, by hashes and by retrieval, against their definitions in plain fp64 loops."""

from __future__ import annotations

import copy
import doctest
import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexsparse as fs
from flexsparse.masks import Causal, Document
from flexsparse.selectors import (
    LightningIndexer,
    ReformerLSH,
    Retrieval,
    Routing,
    SeerAttentionGate,
    TileBudget,
)
from flexsparse.selectors.gates import hard_gates, soft_gates
from flexsparse.selectors.tile_budget import expected_tiles

LENGTHS = [1, 7, 63, 64, 65, 200]
KINDS = ["random", "tied", "constant"]
HEADS = (4, 2)
DIM = 8


def inputs(length: int, kind: str = "random", batch: int = 1) -> tuple[Tensor, Tensor]:
    """q and k in fp64; tied ones take few values, so that many scores are equal to the last bit."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(batch, heads, length, DIM) for heads in HEADS]
    if kind == "constant":
        q, k = (torch.ones(shape, dtype=torch.float64) for shape in shapes)
    elif kind == "tied":
        # Of mean 0 and length 2, so that their products with integers are exact in any order.
        signs = torch.tensor([1.0, 1.0, -1.0, -1.0, 0, 0, 0, 0], dtype=torch.float64)
        table = torch.stack([signs, signs.roll(2), signs.flip(0)])
        q, k = (table[torch.randint(0, 3, shape[:3], generator=draw)] for shape in shapes)
    else:
        q, k = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return q, k


def sets(selection: fs.Selection) -> dict[tuple[int, int, int], set[int]]:
    b, h, r, _ = selection.indices.shape
    return {
        (i, j, m): {c for c in selection.indices[i, j, m].tolist() if c >= 0}
        for i in range(b)
        for j in range(h)
        for m in range(r)
    }


def is_best(chosen: set[int], score: dict[int, float], keep: int, tolerance: float = 1e-9) -> None:
    """``chosen`` are the ``keep`` best of ``score``; of equal scores the lower indices."""
    assert chosen <= set(score) and len(chosen) == min(keep, len(score))
    left = [c for c in score if c not in chosen]
    for c in chosen:
        for other in left:
            assert score[c] >= score[other] - tolerance
            if score[c] == score[other]:
                assert c < other


def indexer(length_heads: tuple[int, int] = HEADS, **options: Any) -> LightningIndexer:
    torch.manual_seed(3)
    made = LightningIndexer(
        heads=length_heads, head_dim=DIM, index_heads=3, index_dim=4, **{"keep": 5} | options
    )
    return made.double()


def gate(**options: Any) -> SeerAttentionGate:
    torch.manual_seed(4)
    given: dict[str, Any] = {"gate_dim": 6, "keep": 3, "block": 16, "q_block": 16} | options
    return SeerAttentionGate(heads=HEADS, head_dim=DIM, **given).double()


# Lightning indexer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_indexer_keeps_the_keys_of_highest_index_score(length: int, kind: str) -> None:
    q, k = inputs(length, kind, batch=2)
    made = indexer()
    chosen = sets(made.select(q, k, fs.Grid(length, length, batch=2), Causal()))
    assert {h for _, h, _ in chosen} == {0}
    linear, norm = made.keys
    for b in range(2):
        for t in sorted({0, 1, length // 2, length - 1} & set(range(length))):
            hidden = torch.cat([q[b, h, t] for h in range(HEADS[0])])
            queries = (made.queries.weight @ hidden).reshape(3, 4)
            weights = made.weights.weight @ hidden * 3**-0.5 * 4**-0.5
            score = {}
            for s in range(t + 1):
                key = linear.weight @ torch.cat([k[b, g, s] for g in range(HEADS[1])])
                key = (key - key.mean()) / (key.var(unbiased=False) + norm.eps).sqrt()
                dots = [max(0.0, float((queries[j] @ key).detach())) for j in range(3)]
                score[s] = sum(float(weights[j].detach()) * dots[j] for j in range(3))
            is_best(chosen[b, 0, t], score, 5)


@pytest.mark.parametrize("length", [65, 200])
def test_the_indexer_in_parts_chooses_what_it_chooses_at_once(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = inputs(length)
    documents = torch.arange(length) // 40
    for rule in (None, Causal(), Causal() & Document(documents)):
        for made in (indexer(), indexer(block=16, q_block=8, keep=2)):
            grid = fs.Grid(length, length)
            monkeypatch.undo()
            once, loss = made.select(q, k, grid, rule), made.loss(q, k, grid, rule)
            monkeypatch.setattr("flexsparse.selectors.parts.ENTRIES", 20 * 4 * length)
            parts, loss_in_parts = made.select(q, k, grid, rule), made.loss(q, k, grid, rule)
            assert torch.equal(once.indices, parts.indices)
            torch.testing.assert_close(loss, loss_in_parts)


def test_a_block_of_the_indexer_takes_its_best_visible_key() -> None:
    """A key of the future does not speak for its block."""
    q, k = inputs(40)
    score = indexer().score(q, k, fs.Grid(40, 40))[0, 0].detach()
    made = indexer(block=8, q_block=1, keep=2)
    chosen = sets(made.select(q, k, fs.Grid(40, 40), Causal()))
    for t in range(40):
        best = {c: float(score[t, c * 8 : min(c * 8 + 8, t + 1)].max()) for c in range(t // 8 + 1)}
        is_best(chosen[0, 0, t], best, 2)


def naive_divergence(target: list[float], logits: list[float]) -> float:
    total = sum(target)
    top = max(logits)
    log_sum = top + math.log(sum(math.exp(x - top) for x in logits))
    return sum(
        p / total * (math.log(p / total) - (x - log_sum))
        for p, x in zip(target, logits, strict=True)
        if p > 0
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_the_indexers_loss_is_the_divergence_from_attention(sparse: bool) -> None:
    """Summed over heads, scaled to 1; all visible keys, or the selected ones alone."""
    length = 33
    q, k = inputs(length)
    made = indexer()
    grid = fs.Grid(length, length)
    select = made.select(q, k, grid, Causal()) if sparse else None
    index = made.score(q, k, grid)[0, 0].tolist()
    dense = [
        (q[0, h] @ k[0, h // 2].mT * DIM**-0.5).masked_fill(
            ~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf
        ).softmax(-1)
        for h in range(HEADS[0])
    ]  # fmt: skip
    mass = sum(dense).tolist()
    want = 0.0
    for t in range(length):
        seen = range(t + 1)
        if select is not None:
            seen = sorted(c for c in select.indices[0, 0, t].tolist() if c >= 0)
        want += naive_divergence([mass[t][s] for s in seen], [index[t][s] for s in seen]) / length
    got = made.loss(q, k, grid, Causal(), select=select)
    torch.testing.assert_close(float(got), want, rtol=1e-5, atol=1e-6)


# SeerAttention gate


@pytest.mark.parametrize("share", ["query", "kv", "shared"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_gate_keeps_the_blocks_of_highest_weight(length: int, kind: str, share: str) -> None:
    q, k = inputs(length, kind)
    made = gate(share=share)
    blocks = math.ceil(length / 16)
    chosen = sets(made.select(q, k, fs.Grid(length, length), Causal()))

    def turned(x: list[float], at: int) -> list[float]:
        out = [0.0] * 6
        for c in range(3):
            angle = at * 10_000.0 ** (-c / 3)
            out[c] = x[c] * math.cos(angle) - x[c + 3] * math.sin(angle)
            out[c + 3] = x[c + 3] * math.cos(angle) + x[c] * math.sin(angle)
        return out

    for row in range(blocks):
        weights = []
        for h in range(HEADS[0]):
            mean = q[0, h, row * 16 : row * 16 + 16].mean(0)
            query = turned((mean @ made.queries[h]).tolist(), row)
            logits = []
            for c in range(row + 1):
                page = k[0, h // 2, c * 16 : c * 16 + 16]
                pooled = torch.cat([page.amax(0), page.amin(0), page.mean(0)])
                key = turned((pooled @ made.keys[h // 2]).tolist(), c)
                logits.append(sum(a * b for a, b in zip(query, key, strict=True)) * 6**-0.5)
            weights.append(torch.tensor(logits, dtype=torch.float64).softmax(0))
        groups = {"query": [[0], [1], [2], [3]], "kv": [[0, 1], [2, 3]], "shared": [[0, 1, 2, 3]]}
        for i, group in enumerate(groups[share]):
            mean = torch.stack([weights[h] for h in group]).mean(0).tolist()
            is_best(chosen[0, i, row], dict(enumerate(mean)), 3)


def test_a_threshold_keeps_the_blocks_above_it() -> None:
    q, k = inputs(200)
    every = gate(keep=13)
    grid = fs.Grid(200, 200)
    weight = every.score(q, k, grid).detach()
    causal = torch.ones(13, 13, dtype=torch.bool).tril()
    weight = weight.masked_fill(~causal, -math.inf).softmax(-1)
    chosen = sets(gate(keep=13, threshold=0.1).select(q, k, grid, Causal()))
    for (b, h, row), found in chosen.items():
        assert found == {c for c in range(row + 1) if float(weight[b, h, row, c]) > 0.1}
    fewer = sets(gate(keep=2, threshold=0.1).select(q, k, grid, Causal()))
    assert all(found <= chosen[at] and len(found) <= 2 for at, found in fewer.items())


def test_the_gates_loss_is_the_divergence_from_the_highest_weights() -> None:
    length = 40
    q, k = inputs(length)
    made = gate()
    logits = made.score(q, k, fs.Grid(length, length))[0]
    want = []
    for h in range(HEADS[0]):
        scores = q[0, h] @ k[0, h // 2].mT * DIM**-0.5
        hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
        mass = scores.masked_fill(hidden, -math.inf).softmax(-1)
        for row in range(3):
            here = mass[row * 16 : row * 16 + 16]
            target = [float(here[:, c * 16 : c * 16 + 16].max()) for c in range(row + 1)]
            want.append(naive_divergence(target, logits[h, row, : row + 1].tolist()))
    got = made.loss(q, k, fs.Grid(length, length), Causal())
    torch.testing.assert_close(float(got), sum(want) / len(want), rtol=1e-5, atol=1e-6)


# Both as modules


def trained() -> list[LightningIndexer | SeerAttentionGate]:
    return [indexer(), gate(), gate(share="kv"), indexer(block=16, q_block=16, keep=2)]


@pytest.mark.parametrize("made", trained(), ids=lambda made: type(made).__name__)
@pytest.mark.parametrize("budget", [None, TileBudget(tile=16, spread=4.0)])
def test_gradients_reach_the_weights_and_nothing_else(made: Any, budget: TileBudget | None) -> None:
    q, k = (x.requires_grad_() for x in inputs(65))
    loss = made.loss(q, k, fs.Grid(65, 65), Causal(), budget=budget)
    loss.backward()
    assert q.grad is None and k.grad is None
    for name, weight in made.named_parameters():
        assert weight.grad is not None and bool(weight.grad.isfinite().all()), name
        # A gate of two rows and two heads may agree with itself, a whole tensor does not.
        assert bool((weight.grad != 0).any()), name


@pytest.mark.parametrize("made", trained(), ids=lambda made: type(made).__name__)
def test_an_empty_row_gives_no_loss_and_no_nan(made: Any) -> None:
    q, k = inputs(40)
    rule = Causal() & fs.MaskRule.of(lambda b, h, q, kv: q >= 20)
    loss = made.loss(q, k, fs.Grid(40, 40), rule, budget=TileBudget(tile=16))
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(w.grad.isfinite().all()) for w in made.parameters())
    blind = made.select(q, k, fs.Grid(40, 40), rule).indices
    assert bool((blind[:, :, : 20 // made.q_block] == -1).all())


def test_one_step_of_training_changes_what_is_selected_next() -> None:
    """A selector is asked anew in each call, under the same plan."""
    q, k = (x.float() for x in inputs(64))
    made = indexer().float()
    options: dict[str, Any] = {"rule": Causal(), "select": made, "backend": "dense"}
    before = fs.attention(q, k, k, **options)
    with torch.no_grad():
        for weight in made.parameters():
            weight.neg_()
    after = fs.attention(q, k, k, **options)
    want = fs.attention(
        q, k, k, **options | {"select": made.select(q, k, fs.Grid(64, 64), Causal())}
    )
    assert not torch.equal(before, after)
    assert torch.equal(after, want)


def test_state_dicts_and_submodules_work_as_for_any_module() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.indexer = indexer()

    one, two = Layer(), Layer()
    for weight in two.parameters():
        nn.init.zeros_(weight)
    two.load_state_dict(one.state_dict())
    q, k = inputs(64)
    grid = fs.Grid(64, 64)
    a, b = (layer.indexer.select(q, k, grid, Causal()).indices for layer in (one, two))
    assert torch.equal(a, b)
    assert "LightningIndexer" in repr(one) and "keep=5" in repr(one)
    assert one.indexer.half().keys[0].weight.dtype == torch.float16


@pytest.mark.parametrize("made", [indexer(), gate()], ids=lambda made: type(made).__name__)
def test_another_layers_tensors_are_refused(made: Any) -> None:
    q, k = inputs(16)
    with pytest.raises(fs.FlexSparseError, match=r"heads=\(4, 2\).*heads=\(2, 2\)"):
        made.select(q[:, :2], k, fs.Grid(16, 16), Causal())


def test_numbers_are_judged() -> None:
    with pytest.raises(fs.FlexSparseError, match="keep"):
        indexer(keep=0)
    with pytest.raises(fs.FlexSparseError, match="gate_dim must be even"):
        gate(gate_dim=5)
    with pytest.raises(fs.FlexSparseError, match="heads must be"):
        gate(share="group")
    q, k = inputs(16)
    lists = gate(block=1, q_block=1, gate_dim=2).select(q, k, fs.Grid(16, 16), Causal())
    with pytest.raises(fs.FlexSparseError, match="4 lists"):
        indexer().loss(q, k, fs.Grid(16, 16), Causal(), select=lists)


# The physical budget


@pytest.mark.parametrize("blocks", [(1, 1), (4, 16), (16, 8)])
@pytest.mark.parametrize("length", LENGTHS)
def test_hard_gates_are_charged_for_the_tiles_of_the_layout(
    length: int, blocks: tuple[int, int]
) -> None:
    q, k = inputs(length)
    made = indexer(q_block=blocks[0], block=blocks[1], keep=2)
    grid = fs.Grid(length, length)
    selection = made.select(q, k, grid)
    layout = fs.build_layout(select=selection, grid=grid, heads=HEADS, block_size=(32, 16))
    gates = hard_gates(made.score(q, k, grid), 2).double()
    tiles = expected_tiles(gates, (32 // blocks[0], 16 // blocks[1]))
    torch.testing.assert_close(
        float(tiles.sum()) * HEADS[0], float(layout.budget().physical_tiles), rtol=1e-4, atol=0
    )


def test_the_expectation_is_that_of_all_outcomes() -> None:
    """Every outcome of eight gates, weighed by its chance."""
    draw = torch.Generator().manual_seed(0)
    gates = torch.rand(1, 1, 2, 4, generator=draw, dtype=torch.float64)
    want = 0.0
    for outcome in range(256):
        open_ = torch.tensor([(outcome >> i) & 1 for i in range(8)]).reshape(2, 4).double()
        chance = float(torch.where(open_ > 0, gates[0, 0], 1 - gates[0, 0]).prod())
        want += chance * sum(float(open_[:, c : c + 2].any()) for c in (0, 2))
    torch.testing.assert_close(float(expected_tiles(gates, (2, 2)).sum()), want)
    bound = expected_tiles(gates, (2, 2), spread=3.0).sum()
    assert float(bound) < want


def test_neighbours_that_want_the_same_keys_cost_no_more_than_one_of_them() -> None:
    apart, together = torch.zeros(2, 1, 1, 4, 8).unbind(0)
    together[..., 0] = 1.0
    apart[0, 0].fill_diagonal_(1.0)
    charge = TileBudget(tile=(64, 32), weight=2.0)
    close = charge(together, 16, 16), charge(apart, 16, 16)
    torch.testing.assert_close([float(x) for x in close], [2 * 1 / 4, 2 * 2 / 4], rtol=1e-4, atol=0)
    free = TileBudget(tile=(64, 32), capacity=1)
    assert float(free(together, 16, 16)) == 0.0 and float(free(apart, 16, 16)) > 0.2


def test_a_tile_must_hold_whole_blocks() -> None:
    with pytest.raises(fs.FlexSparseError, match=r"\(64, 64\).*\(48, 16\)"):
        TileBudget(tile=64)(torch.zeros(1, 1, 2, 2), 48, 16)
    with pytest.raises(fs.FlexSparseError, match="spread at least 1"):
        TileBudget(spread=0.5)


def test_about_keep_soft_gates_are_open() -> None:
    draw = torch.Generator().manual_seed(1)
    score = torch.randn(50, 100, generator=draw, dtype=torch.float64)
    score[:, 90:] = -math.inf
    score[0, 3:] = -math.inf
    gates = soft_gates(score, 10, temperature=0.05)
    assert bool((gates[:, 90:] == 0).all()) and gates[0, :3].tolist() == [1.0] * 3
    assert bool(((gates[1:] > 0.5) == hard_gates(score, 10)[1:]).all())
    torch.testing.assert_close(float(gates[1:].sum(-1).mean()), 10.0, rtol=0.05, atol=0)


# Hashes, clusters, retrieval


def pair_sets(
    met: dict[tuple[int, int, int], set[int]], selector: Any, q: Tensor, k: Tensor
) -> None:
    length = q.shape[2]
    grid = fs.Grid(length, length)
    chosen = sets(selector.select(q, k, grid, Causal()))
    # Who meets no key of the past keeps its own.
    assert chosen == {at: {s for s in found if s <= at[2]} or {at[2]} for at, found in met.items()}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_lsh_meets_the_keys_of_the_same_hash_in_two_chunks(
    length: int, kind: str, shared: bool
) -> None:
    q, k = inputs(length, kind)
    if shared:
        q = k.repeat_interleave(2, 1)
    made = ReformerLSH(buckets=4, rounds=2, chunk=8, keep=10**6, shared_qk=shared)
    met: dict[tuple[int, int, int], set[int]] = {
        (0, h, t): set() for h in range(HEADS[0]) for t in range(length)
    }

    def hashed(x: Tensor, directions: Tensor) -> int:
        dots = (x[None] @ directions)[0].tolist()
        both = dots + [-d for d in dots]
        return both.index(max(both))

    for directions in made.directions(DIM):
        for h in range(HEADS[0]):
            codes = [(hashed(k[0, h // 2, s], directions), s) for s in range(length)]
            order = sorted(codes)
            for t in range(length):
                own = (hashed(q[0, h, t], directions), t)
                rank = min(sum(code < own for code in codes), length - 1)
                chunk = rank // 8
                near = order[max(0, chunk - 1) * 8 : (chunk + 1) * 8]
                met[0, h, t] |= {s for code, s in near if code == own[0]}
    if shared:
        for (_, _, t), found in met.items():
            if {s for s in found if s < t}:
                found.discard(t)
    pair_sets(met, made, q, k)


def test_lsh_within_a_budget_prefers_keys_met_in_more_rounds() -> None:
    q, k = inputs(64)
    made = ReformerLSH(buckets=2, rounds=4, chunk=64, keep=9)
    grid = fs.Grid(64, 64)
    same = torch.zeros(4, 64, 64)
    for directions in made.directions(DIM):
        above = [x[0] @ directions > 0 for x in (q, k.repeat_interleave(2, 1))]
        same += above[0] == above[1].mT
    for (_, h, t), found in sets(made.select(q, k, grid)).items():
        score = {s: n for s, n in enumerate(same[h, t].tolist()) if n}
        is_best(found, score, 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_routing_joins_queries_and_keys_of_a_centroid(length: int, kind: str) -> None:
    q, k = inputs(length, kind)
    draw = torch.Generator().manual_seed(9)
    centre = torch.randint(-9, 10, (2, 3, DIM), generator=draw).double()
    made = Routing(clusters=3, centroids=centre, keep=10**6)

    def unit(x: Tensor) -> Tensor:
        x = x - x.mean()
        size = float(x.square().sum().sqrt())
        return x / size if size else x

    met: dict[tuple[int, int, int], set[int]] = {
        (0, h, t): set() for h in range(HEADS[0]) for t in range(length)
    }
    takes = math.ceil(length / 3)
    for h in range(HEADS[0]):
        for c in range(3):
            near = [
                (centre[h // 2, c] @ torch.stack([unit(x[t]) for t in range(length)]).mT).tolist()
                for x in (q[0, h], k[0, h // 2])
            ]
            queries, keys = (
                sorted(range(length), key=lambda t, s=side: (-s[t], t))[:takes] for side in near
            )
            for t in queries:
                met[0, h, t] |= set(keys)
    pair_sets(met, made, q, k)


def test_k_means_finds_clusters_that_are_there() -> None:
    draw = torch.Generator().manual_seed(2)
    centre = 5 * torch.randn(4, DIM, generator=draw, dtype=torch.float64)
    owner = torch.randint(0, 4, (64,), generator=draw)
    x = (centre[owner] + 0.01 * torch.randn(64, DIM, generator=draw))[None, None]
    # The evenly spread seeds must meet all clusters for k-means to part them.
    x[0, 0, ::16] = centre
    owner[::16] = torch.arange(4)
    chosen = sets(Routing(clusters=4, keep=64).select(x, x, fs.Grid(64, 64)))
    near = [sum(int(owner[s] == owner[t]) for s in found) for (_, _, t), found in chosen.items()]
    total = [len(found) for found in chosen.values()]
    assert sum(near) / sum(total) > 0.8


@pytest.mark.parametrize("made", [ReformerLSH(chunk=16, block=16, q_block=8, keep=2),
                                  Routing(block=16, q_block=8, keep=2)], ids=["lsh", "routing"])  # fmt: skip
def test_blocks_and_rows_take_part_in_budgets(made: Any) -> None:
    q, k = (x.float() for x in inputs(100))
    chosen = made.select(q, k, fs.Grid(100, 100), Causal())
    assert chosen.indices.shape == (1, 4, 13, 2)
    assert bool((chosen.indices <= (torch.arange(13)[:, None] * 8 + 7) // 16).all())
    assert fs.check(q, k, k, rule=Causal(), select=chosen).ok


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_flat_index_finds_the_keys_of_highest_product(length: int, kind: str) -> None:
    pytest.importorskip("faiss")
    q, k = inputs(length, kind)
    chosen = sets(Retrieval(keep=6).select(q, k, fs.Grid(length, length), Causal()))
    for (b, h, t), found in chosen.items():
        score = {s: float(q[b, h, t] @ k[b, h // 2, s]) for s in range(t + 1)}
        assert found <= set(score) and len(found) == min(6, len(score))
        least = min(score[s] for s in found)
        assert all(score[s] <= least + 1e-5 for s in score if s not in found)


def test_an_approximate_index_finds_most_of_them() -> None:
    pytest.importorskip("faiss")
    q, k = inputs(200)
    grid = fs.Grid(200, 200)
    true = sets(Retrieval(keep=8).select(q, k, grid, Causal()))
    for made in (
        Retrieval(keep=8, index="HNSW16"),
        Retrieval(keep=8, index="IVF4,Flat", settings="nprobe=4"),
    ):
        found = sets(made.select(q, k, grid, Causal()))
        hits = sum(len(found[at] & true[at]) for at in true)
        assert hits > 0.9 * sum(map(len, true.values()))
    with pytest.raises(fs.FlexSparseError, match="'no such'"):
        Retrieval(index="no such").select(q, k, grid)
    with pytest.raises(fs.FlexSparseError, match="block and q_block must be 1"):
        Retrieval(block=2)
    with pytest.raises(fs.FlexSparseError, match="Retrieval keep must be an int, got 0.5"):
        Retrieval(keep=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gates", "tile_budget", "parts"])
def test_the_pictures_in_docstrings_hold(name: str) -> None:
    module = import_module(f"flexsparse.selectors.{name}")
    found = doctest.testmod(module, extraglobs={"torch": torch})
    assert found.attempted and not found.failed


@pytest.mark.gpu
@pytest.mark.parametrize(
    "made",
    [indexer(), gate(), ReformerLSH(chunk=8), Routing(clusters=4)],
    ids=lambda made: type(made).__name__,
)
def test_a_gpu_selects_what_the_cpu_does(made: Any, device: torch.device) -> None:
    """In fp64, where no two scores are near enough to change places."""
    q, k = inputs(200)
    grid = fs.Grid(200, 200)
    want = made.select(q, k, grid, Causal())
    there = copy.deepcopy(made).to(device) if isinstance(made, nn.Module) else made
    got = there.select(q.to(device), k.to(device), grid, Causal())
    assert torch.equal(got.indices.cpu(), want.indices)
