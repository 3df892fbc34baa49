"""Decode state: token by token, a cache chooses what its selector chooses over all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_selectors import DIM, HEADS, INPUTS, KV_HEADS, drawn

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.selectors import (
    H2O,
    Cache,
    Mass,
    MeanPooled,
    OracleTopK,
    OracleTopP,
    Quest,
    Random,
    Reuse,
    SnapKV,
    StreamingLLM,
    Tiles,
)

FORMS: dict[str, Any] = {
    "quest": lambda: Quest(block=8, keep=3, q_block=1, heads="query"),
    "quest mass": lambda: Quest(block=8, keep=Mass(0.6), q_block=16, heads="shared"),
    "quest tiles": lambda: Quest(
        block=4, q_block=1, keep=Tiles(q_tile=8, kv_tile=16, most=2, each=0.5)
    ),
    "mean": lambda: MeanPooled(block=8, keep=3, q_block=1),
    "mean of odd blocks": lambda: MeanPooled(block=7, keep=0.3, q_block=4, heads="query"),
    "streaming": lambda: StreamingLLM(block=4, q_block=2, sinks=3, window=20),
    "oracle": lambda: OracleTopK(block=4, q_block=1, keep=4),
    "oracle p": lambda: OracleTopP(block=4, q_block=1, keep=Mass(0.5)),
    "random": lambda: Random(block=4, q_block=1, keep=4),
}


def same(a: fs.Selection, b: fs.Selection) -> None:
    assert torch.equal(a.indices, b.indices), (a.indices, b.indices)


@pytest.mark.parametrize("drawing", INPUTS)
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=4, deadline=None, database=None)
@given(
    start=st.sampled_from([1, 7, 63, 64, 65]),
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 7, 17]), min_size=1, max_size=8),
    spare=st.sampled_from([0, 9]),
    late=st.booleans(),
)
def test_a_cache_chooses_what_its_selector_does(
    name: str, drawing: str, start: int, steps: list[int], spare: int, late: bool
) -> None:
    end = start + sum(steps)
    q, k = drawn(drawing, end, end)
    selector = FORMS[name]()
    cache = selector.cache(k[:, :, :start], capacity=end + spare)
    length = start
    for step in [0, *steps]:
        cache.append(k[:, :, length : length + step])
        length += step
        new = step or min(start, 3)
        queries, seen = q[:, :, length - new : length], k[:, :, :length]
        offset = torch.tensor([0, length - new]) if late else None
        grid = fs.Grid(new, length, q_offset=offset, batch=2)
        same(cache.select(queries, grid, Causal()), selector.select(queries, seen, grid, Causal()))
    assert int(cache.length) == end


@pytest.mark.parametrize("name", ["quest", "mean", "streaming", "oracle"])
def test_a_grid_of_the_whole_capacity(name: str) -> None:
    """Shapes that never change: what is not there yet is hidden by the rule."""
    q, k = drawn("random", 40, 40)
    selector = FORMS[name]()
    cache = selector.cache(k[:, :, :20], capacity=40)
    offset = torch.tensor(20)
    for length in range(21, 41):
        cache.append(k[:, :, length - 1 : length])
        query = q[:, :, length - 1 : length]
        fixed = cache.select(query, fs.Grid(1, 40, q_offset=offset, batch=2), Causal())
        grown = cache.select(query, fs.Grid(1, length, batch=2), Causal())
        wide = grown.indices.shape[-1]
        assert torch.equal(fixed.indices[..., :wide], grown.indices)
        assert bool((fixed.indices[..., wide:] == -1).all())
        offset += 1


@pytest.mark.parametrize("drawing", INPUTS)
@pytest.mark.parametrize("prompt", [1, 7, 33])
@pytest.mark.parametrize("kind", ["h2o", "snap"])
def test_a_cache_that_watches_the_queries(kind: str, prompt: int, drawing: str) -> None:
    """H2O and SnapKV: told every query once, in chunks or one by one."""
    end = prompt + 12
    q, k = drawn(drawing, end, end)
    selector: fs.Selector = (
        H2O(heavy=3, recent=4) if kind == "h2o" else SnapKV(prompt=prompt, prefix=3, window=4)
    )
    whole = selector.select(q, k, fs.Grid(end, end, batch=2), Causal())
    cache = selector.cache(k[:, :, :prompt], capacity=end)
    found = [cache.select(q[:, :, :prompt], fs.Grid(prompt, prompt, batch=2), Causal())]
    for at in range(prompt, end):
        cache.append(k[:, :, at : at + 1])
        found.append(cache.select(q[:, :, at : at + 1], fs.Grid(1, at + 1, batch=2), Causal()))
    rows = [part.blocks() for part in found]
    grown = torch.cat([torch.nn.functional.pad(row, (0, end - row.shape[-1])) for row in rows], 2)
    assert torch.equal(grown, whole.blocks())


def test_a_cache_holds_no_more_than_it_must() -> None:
    _, k = drawn("random", 64, 64)
    held = {
        name: sum(x.numel() for x in vars(FORMS[name]().cache(k)).values() if torch.is_tensor(x))
        for name in ("streaming", "oracle")
    }
    assert held == {"streaming": 1, "oracle": 1 + 2 * KV_HEADS * 65 * DIM}
    pools = FORMS["quest"]().cache(k).pools
    assert sum(x.numel() for x in pools.values()) == 2 * 2 * KV_HEADS * 9 * DIM
    snap = SnapKV(prompt=64, window=4).cache(k, capacity=100)
    q, _ = drawn("random", 64, 64)
    snap.select(q, fs.Grid(64, 64, batch=2), Causal())
    assert not hasattr(snap, "keys")


def test_appending_writes_in_place() -> None:
    """So that a captured step goes on writing where it did."""
    q, k = drawn("random", 20, 20)
    for name in ("quest", "mean", "oracle"):
        cache = FORMS[name]().cache(k[:, :, :10], capacity=20)
        held = [cache.keys] if name == "oracle" else [*cache.pools.values(), cache.filled]
        held.append(cache.length)
        places = [x.data_ptr() for x in held]
        cache.append(k[:, :, 10:])
        cache.select(q, fs.Grid(20, 20, batch=2), Causal())
        assert [x.data_ptr() for x in held] == places
        assert int(cache.length) == 20


@pytest.mark.parametrize("name", ["quest", "mean", "streaming", "oracle", "random"])
def test_a_forgotten_append_is_told(name: str) -> None:
    q, k = drawn("random", 65, 65)
    cache = FORMS[name]().cache(k[:, :, :64], capacity=70)
    one = q[:, :, -1:]
    told = "holds 64 keys, got a grid of 65 whose last query stands at position 64: append"
    for offset in (None, 64, torch.tensor([63, 64])):
        with pytest.raises(fs.FlexSparseError, match=told):
            cache.select(one, fs.Grid(1, 65, q_offset=offset, batch=2), Causal())
    with pytest.raises(fs.FlexSparseError, match="holds 64 keys .* a grid of 63"):
        cache.select(one, fs.Grid(1, 63, batch=2), Causal())
    with pytest.raises(fs.FlexSparseError, match="holds 64 keys, got a grid of 70"):
        cache.select(one, fs.Grid(1, 70, batch=2), Causal())
    # A buffer, whose rule hides what is not there yet.
    whole = cache.select(one, fs.Grid(1, 64, batch=2), Causal())
    for offset in (63, torch.tensor(63), torch.tensor([63, 63])):
        buffer = cache.select(one, fs.Grid(1, 70, q_offset=offset, batch=2), Causal())
        found = buffer.blocks()[..., : whole.candidates]
        assert name == "random" or torch.equal(found, whole.blocks().expand_as(found))
    cache.append(k[:, :, 64:])
    cache.select(one, fs.Grid(1, 65, batch=2), Causal())


def test_a_forgotten_append_is_told_where_sizes_are_compiled() -> None:
    q, k = drawn("random", 65, 65)
    cache = FORMS["quest"]().cache(k[:, :, :64], capacity=70)

    @torch.compile(fullgraph=True, backend="eager", dynamic=False)
    def step(one: torch.Tensor, length: int, offset: torch.Tensor | None = None) -> torch.Tensor:
        grid = fs.Grid(1, length, q_offset=offset, batch=2)
        return cache.select(one, grid, None).indices

    one = q[:, :, -1:]
    assert torch.equal(step(one, 64), cache.select(one, fs.Grid(1, 64, batch=2)).indices)
    with pytest.raises(Exception, match="holds 64 keys, got a grid of 65"):
        step(one, 65)
    with pytest.raises(Exception, match="holds 64 keys .* a grid of 63"):
        step(one, 63)
    assert step(one, 70, torch.tensor(63)).shape[-1] == 3


def test_a_compiled_append_is_counted_on_the_device() -> None:
    """A replay of it is no call that the host could count."""
    q, k = drawn("random", 66, 66)
    cache = FORMS["quest"]().cache(k[:, :, :64], capacity=66)
    append = torch.compile(cache.append, fullgraph=True, backend="eager")
    for length in (65, 66):
        append(k[:, :, length - 1 : length])
        with pytest.raises(fs.FlexSparseError, match=f"holds {length} keys"):
            cache.select(q[:, :, :1], fs.Grid(1, 64, batch=2), Causal())
        cache.select(q[:, :, :1], fs.Grid(1, length, batch=2), Causal())


def test_layers_that_reuse_a_selection() -> None:
    """TidalDecode: layers 2 and 5 select, those after take over, those before see everything."""
    end, layers = 24, 8
    q, k = drawn("random", end * layers, end * layers)
    qs, ks = (x.unflatten(2, (layers, end)).unbind(2) for x in (q, k))
    token = OracleTopK(block=1, q_block=1, keep=4)
    reuse = Reuse(token, layers=(2, 5))
    assert [reuse.source(n) for n in range(layers)] == [None, None, 2, 2, 2, 5, 5, 5]
    assert reuse[0] is None and reuse[3] is reuse[3]
    caches: dict[int, Cache] = {}
    for length in range(16, end):
        grid = fs.Grid(1, length, batch=2)
        for layer in range(2, layers):
            one, keys = qs[layer][:, :, length - 1 : length], ks[layer][:, :, :length]
            selector = reuse[layer]
            assert selector is not None
            if length == 16:
                caches[layer] = selector.cache(keys, capacity=end)
            else:
                caches[layer].append(keys[:, :, -1:])
            chosen = caches[layer].select(one, grid, Causal())
            source = 2 if layer < 5 else 5
            at = [x[source][:, :, :y] for x, y in ((qs, length), (ks, length))]
            same(chosen, token.select(at[0][:, :, -1:], at[1], grid, Causal()))
            same(selector.select(one, keys, grid, Causal()), chosen)
    # Nothing of a layer that reuses is kept but its length.
    assert not hasattr(caches[3], "keys")


def test_a_stale_selection_is_refused() -> None:
    q, k = drawn("random", 9, 9)
    reuse = Reuse(Quest(block=4, keep=1, q_block=1), layers=(1,))
    last, first = reuse[2], reuse[1]
    assert last is not None and first is not None
    with pytest.raises(fs.FlexSparseError, match="layer 2 .* layer 1, which has selected nothing"):
        last.select(q, k, fs.Grid(9, 9, batch=2))
    first.select(q, k, fs.Grid(9, 9, batch=2))
    with pytest.raises(fs.FlexSparseError, match="run that layer first in each step"):
        last.select(q[:, :, :1], k, fs.Grid(1, 9, batch=2))
    for layers in ((), (2, 1), (1, 1), [1], (-1,)):
        with pytest.raises(fs.FlexSparseError, match="tuple of rising ints"):
            Reuse(Quest(), layers=layers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda k: Quest().cache(k, capacity=8), "capacity must be .* at least the 9 keys"),
        (lambda k: Quest().cache(k).append(k[:, :, :1]), "exceeds the capacity 9"),
        (lambda k: Quest().cache(k).append(k[:, :1]), r"append takes keys \[2, 2, n, 16\]"),
        (
            lambda k: Quest().cache(k).select(k, fs.Grid(9, 10, batch=2)),
            "a cache of capacity 9 .* got a grid of 10",
        ),
        (lambda k: Quest().cache(k[0]), r"k must have 4 axes \[b h n d\]"),
        (lambda k: Quest().cache(k).append(3), r"append takes keys .* got int"),
        (
            lambda k: Quest().cache(k).select(k[:1], fs.Grid(9, 9, batch=2)),
            r"of 2 sequences selects for q \[2, Hq, 9, D\] .* got \[1, 2, 9, 16\]",
        ),
    ],
)
def test_wrong_uses(wrong: Any, words: str) -> None:
    with pytest.raises(fs.FlexSparseError, match=words):
        wrong(drawn("random", 9, 9)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["quest", "mean", "streaming", "oracle", "h2o"])
def test_a_step_in_a_graph(name: str, device: torch.device) -> None:
    """Append, move on and select, captured once; each replay chooses what a step outside does."""
    q, k = (x.to(device) for x in drawn("random", 64, 64))
    make = FORMS | {"h2o": lambda: H2O(heavy=3, recent=4)}
    selector = make[name]()
    inside, outside = (selector.cache(k[:, :, :32], capacity=64) for _ in range(2))
    query, key = q[:, :, :1].clone(), k[:, :, :1].clone()
    offset = torch.tensor(31, device=device)
    grid = fs.Grid(1, 64, q_offset=offset, batch=2)

    def step() -> torch.Tensor:
        inside.append(key)
        offset.add_(1)
        return inside.select(query, grid, Causal()).indices

    def arrive(at: int) -> torch.Tensor:
        query.copy_(q[:, :, at : at + 1])
        key.copy_(k[:, :, at : at + 1])
        outside.append(key)
        return outside.select(query, fs.Grid(1, at + 1, batch=2), Causal()).blocks()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        arrive(32)
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for at in range(33, 64):
        want = arrive(at)
        graph.replay()
        chosen = fs.Selection.from_indices(
            found, kv_len=64, q_len=1, kv_block=selector.block, out_of_range="drop"
        )
        assert torch.equal(chosen.blocks()[..., : want.shape[-1]], want), at
        assert bool((chosen.counts == want.sum(-1)).all())
    assert int(inside.length) == 64


@pytest.mark.gpu
def test_cuda_chooses_what_the_cpu_does(device: torch.device) -> None:
    q, k = drawn("tied", 65, 65)
    grid = fs.Grid(65, 65, batch=2)
    assert q.shape[1] == HEADS
    for name, make in FORMS.items():
        here = make().select(q, k, grid, Causal()).indices
        there = make().select(q.to(device), k.to(device), grid, Causal()).indices
        if name.startswith(("quest", "streaming", "random")):
            assert torch.equal(here, there.cpu()), name
        else:
            assert here.shape == there.shape
    for watching in (H2O(heavy=3, recent=4), SnapKV(prompt=40, prefix=3, window=4)):
        q, k = drawn("random", 65, 65)
        here = watching.select(q, k, grid, Causal()).indices
        there = watching.select(q.to(device), k.to(device), grid, Causal()).indices
        assert torch.equal(here, there.cpu())
