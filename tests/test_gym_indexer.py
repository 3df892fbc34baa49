"""attention-gym's indexer as a selector: what it is given and what becomes of what it gives."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.selectors import GymIndexer, LightningIndexer, Quest


def definition(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, *, causal: bool, impl: str
) -> Tensor:
    """Its documented contract, query by query: positions in no order, -1 behind them."""
    found = torch.full((*q.shape[:2], topk), -1, dtype=torch.int32)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            end = t + 1 if causal else k.shape[1]
            score = (k[b, :end] @ q[b, t].mT).clamp(min=0) @ weights[b, t]
            best = score.argsort(descending=True)[:topk].flip(0)
            found[b, t, : len(best)] = best.to(torch.int32)
    return found


@pytest.fixture(params=["definition", "installed"])
def gym(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "installed":
        if importlib.util.find_spec("attn_gym") is None:
            pytest.skip("attention-gym is not installed")
        return
    parent, module = types.ModuleType("attn_gym"), types.ModuleType("attn_gym.sparse")
    module.lightning_indexer = definition  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attn_gym", parent)
    monkeypatch.setitem(sys.modules, "attn_gym.sparse", module)


def indexer(**options: Any) -> LightningIndexer:
    torch.manual_seed(3)
    given: dict[str, Any] = {"keep": 5, "index_heads": 3, "index_dim": 8} | options
    return LightningIndexer(heads=(4, 2), head_dim=16, **given).double()


@pytest.mark.parametrize("rule", [Causal(), None], ids=["causal", "none"])
@pytest.mark.parametrize("length", [1, 7, 63, 65])
def test_it_keeps_what_the_indexer_keeps(length: int, rule: Any, gym: None) -> None:
    draw = torch.Generator().manual_seed(length)
    q = torch.randn(2, 4, length, 16, generator=draw, dtype=torch.float64)
    k = torch.randn(2, 2, length, 16, generator=draw, dtype=torch.float64)
    grid, own = fs.Grid(length, length, batch=2), indexer()
    chosen = GymIndexer(indexer=own, impl="reference").select(q, k, grid, rule)
    want = own.select(q, k, grid, rule)
    assert torch.equal(chosen.counts, want.counts)
    # What is kept instead of another scores as much: equal scores, such as none at all, go to any.
    score = own.score(q, k, grid)
    kept = [
        score.masked_fill(~x.dense(), torch.inf).sort(-1).values[..., :5] for x in (chosen, want)
    ]
    torch.testing.assert_close(*kept, atol=1e-12, rtol=0)
    assert fs.check(q, k, k, rule=rule, select=chosen).ok


def test_what_it_does_not_know_is_refused(gym: None) -> None:
    q, k = torch.randn(1, 4, 6, 16).double(), torch.randn(1, 2, 9, 16).double()
    made = GymIndexer(indexer=indexer(), impl="reference")
    for keys, grid, rule, words in (
        (k, fs.Grid(6, 9), Causal(), "as many queries as keys"),
        (k[:, :, :6], fs.Grid(6, 6, q_offset=2), Causal(), "as many queries as keys"),
        (k[:, :, :6], fs.Grid(6, 6), SlidingWindow(3), r"knows Causal\(\) or no rule"),
    ):
        with pytest.raises(fs.FlexSparseError, match=words):
            made.select(q, keys, grid, rule)
    for wrong, words in (
        ({"indexer": Quest()}, "must be a LightningIndexer"),
        ({"indexer": indexer(), "impl": "own"}, "'fused' or 'reference'"),
        ({"indexer": indexer(block=16, q_block=16)}, "block=1, q_block=1"),
    ):
        with pytest.raises(fs.FlexSparseError, match=words):
            GymIndexer(**wrong)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attn_gym", None)
    monkeypatch.setitem(sys.modules, "attn_gym.sparse", None)
    q, k = torch.randn(1, 4, 6, 16).double(), torch.randn(1, 2, 6, 16).double()
    with pytest.raises(fs.FlexSparseError, match="pip install attn-gym"):
        GymIndexer(indexer=indexer()).select(q, k, fs.Grid(6, 6), Causal())
