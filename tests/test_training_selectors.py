"""Selectors that learn: attention's mass is found after training, and tiles are saved where they cost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.selectors import LightningIndexer, SeerAttentionGate, TileBudget


def example() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "train_gate.py"
    spec = importlib.util.spec_from_file_location("train_gate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning indexer", "seer gate"])
def test_training_finds_attention_and_the_budget_saves_tiles(name: str) -> None:
    module = example()
    rows = module.figures(name, *module.sample())
    before, after, budgeted = (rows[x] for x in ("untrained", "trained", "with tile budget"))
    assert after.seen > before.seen + 0.3 and after.unseen > before.unseen + 0.3
    # As much attention kept, of as many pairs, in fewer tiles.
    assert budgeted.seen > after.seen - 0.02 and budgeted.unseen > after.unseen - 0.02
    assert budgeted.tiles < 0.9 * after.tiles and budgeted.inflation < 0.9 * after.inflation


@pytest.mark.parametrize("kind", ["indexer", "gate"])
def test_some_steps_of_training_find_more_and_touch_less(kind: str) -> None:
    """The example in small: the first 160 tokens of its sample, judged on what was trained on."""
    module = example()
    q, k = (x[:, :, :160] for x in module.sample())

    def made() -> Any:
        torch.manual_seed(0)
        if kind == "indexer":
            return LightningIndexer(heads=(9, 3), head_dim=64, index_heads=2, index_dim=8, keep=12)
        return SeerAttentionGate(
            heads=(9, 3), head_dim=64, gate_dim=8, keep=3, block=8, q_block=8, share="kv"
        )

    untrained, plain, charged = made(), made(), made()
    module.train(plain, q, k, 40, None)
    module.train(charged, q, k, 40, TileBudget(tile=16, weight=4.0, spread=4.0))
    before, after, budgeted = (module.kept(x, q, k, 16) for x in (untrained, plain, charged))
    assert after.seen > before.seen + 0.1
    assert budgeted.seen > before.seen + 0.1
    assert budgeted.tiles < after.tiles


def test_a_dense_start_and_a_sparse_end_lower_the_indexers_loss() -> None:
    """Both stages: over all keys, then over those that it selects itself."""
    module = example()
    q, k = (x[:, :, :96] for x in module.sample())
    grid = fs.Grid(96, 96)
    torch.manual_seed(0)
    made = LightningIndexer(heads=(9, 3), head_dim=64, index_heads=2, index_dim=8, keep=16)
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    losses: dict[bool, list[float]] = {False: [], True: []}
    for step in range(40):
        sparse = step >= 20
        select = made.select(q, k, grid, Causal()) if sparse else None
        loss = made.loss(q, k, grid, Causal(), select=select)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[sparse].append(float(loss.detach()))
    assert losses[False][-1] < 0.8 * losses[False][0]
    assert losses[True][-1] < 0.9 * losses[True][0]
