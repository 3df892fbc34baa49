"""Selectors that learn: attention's mass is found after training, and tiles are saved where they cost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.selectors import LightningIndexer, SeerAttentionGate, TileBudget
from flexsparse.selectors.gates import hard_gates
from flexsparse.selectors.tile_budget import expected_tiles
from flexsparse.selectors.trained import charged, divergence


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


def test_some_steps_of_training_find_more_and_touch_less() -> None:
    """The example in small: the first 96 tokens of its sample, judged on what was trained on."""
    module = example()
    q, k = (x[:, :, :96] for x in module.sample())

    def made() -> SeerAttentionGate:
        torch.manual_seed(0)
        return SeerAttentionGate(
            heads=(9, 3), head_dim=64, gate_dim=8, keep=3, block=8, q_block=8, share="kv"
        )

    untrained, plain, budgeted = made(), made(), made()
    module.train(plain, q, k, 30, None)
    module.train(budgeted, q, k, 30, TileBudget(tile=16, weight=4.0, spread=4.0))
    before, after, saved = (module.kept(x, q, k, 16) for x in (untrained, plain, budgeted))
    assert after.seen > before.seen + 0.1
    assert saved.seen > before.seen + 0.1
    assert saved.tiles < after.tiles


def test_a_charge_for_tiles_moves_a_choice_to_where_the_neighbours_are() -> None:
    """Half the rows have their second best key alone in a tile; the third best, nearly as good, is not."""
    rows, keys = 8, 32
    target = torch.zeros(1, 1, rows, keys)
    target[..., 0], target[..., 1] = 0.5, 0.24
    target[0, 0, torch.arange(rows), 4 + 3 * torch.arange(rows)] = 0.26

    class Fixed(fs.Selector):
        pass

    selector = Fixed(block=1, q_block=1, keep=2)
    chosen = []
    for budget in (None, TileBudget(tile=(16, 16), weight=1.0)):
        score = torch.zeros_like(target).requires_grad_()
        optimizer = torch.optim.Adam([score], lr=0.1)
        for _ in range(100):
            loss = divergence(target, score).mean()
            if budget is not None:
                loss = loss + charged(selector, score, budget)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        gates = hard_gates(score, 2).float()
        chosen.append(((target * gates).sum(-1).mean(), expected_tiles(gates, (16, 16)).sum()))
    (plain, all_tiles), (near, fewer_tiles) = chosen
    torch.testing.assert_close([float(plain), float(near)], [0.76, 0.75])
    assert round(float(all_tiles)) == 2 and round(float(fewer_tiles)) == 1


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
