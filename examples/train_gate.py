"""Two selectors learn what attention looks at, with and without a charge for the tiles they touch.

    python examples/train_gate.py

On q and k of a layer of SmolLM2-135M that come along: trained on the first 768 tokens, judged on those
and on the last 256 queries, which training never saw. Some five minutes on two CPU cores.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

import flexsparse as fs
from flexsparse.experiment.inputs import SAMPLES
from flexsparse.masks import Causal
from flexsparse.selectors import LightningIndexer, OracleTopK, SeerAttentionGate, TileBudget
from flexsparse.selectors.oracle import attention_mass

TRAINED = 768
TILE = {"lightning indexer": 32, "seer gate": 64}
STEPS = {"lightning indexer": 60, "seer gate": 150}
BUDGET = {
    "lightning indexer": TileBudget(tile=32, weight=1.0, spread=16.0),
    "seer gate": TileBudget(tile=64, weight=2.0, spread=4.0),
}


class Kept(NamedTuple):
    """What a selection keeps: attention's mass on the queries trained on, on the others; and its tiles."""

    seen: float
    unseen: float
    tiles: int
    inflation: float


def sample() -> tuple[Tensor, Tensor]:
    """q ``[1, 9, 1024, 64]`` and k ``[1, 3, 1024, 64]``."""
    stored = load_file(SAMPLES / "smollm2_layer.safetensors")
    return stored["q"].float(), stored["k"].float()


def selector(name: str) -> LightningIndexer | SeerAttentionGate:
    """64 tokens a query for all heads, or 8 blocks of 16 keys for each 16 queries and KV head."""
    torch.manual_seed(0)
    layer = {"heads": (9, 3), "head_dim": 64}
    if name == "lightning indexer":
        return LightningIndexer(**layer, index_heads=8, index_dim=32, keep=64)
    return SeerAttentionGate(**layer, gate_dim=64, keep=8, block=16, q_block=16, share="kv")


def kept(made: fs.Selector, q: Tensor, k: Tensor, tile: int) -> Kept:
    grid = fs.Grid(q.shape[2], k.shape[2])
    chosen = made.select(q, k, grid, Causal())
    layout = fs.build_layout(rule=Causal(), select=chosen, grid=grid, heads=(9, 3), block_size=tile)
    budget = layout.budget()
    lists = chosen.indices.to(torch.int64)
    marks = torch.zeros(*lists.shape[:3], chosen.candidates + 1)
    marks.scatter_(3, lists.where(lists >= 0, chosen.candidates), 1.0)
    seen = marks[:, :, torch.arange(grid.q_len) // chosen.q_block]
    seen = seen[..., torch.arange(grid.kv_len) // chosen.kv_block]
    mass = attention_mass(q, k, grid, Causal(), None)
    found = (mass * seen.repeat_interleave(9 // seen.shape[1], 1)).sum(-1).mean((0, 1))
    return Kept(
        float(found[:TRAINED].mean()), float(found[TRAINED:].mean()),
        budget.physical_tiles, budget.inflation,
    )  # fmt: skip


def train(
    made: LightningIndexer | SeerAttentionGate,
    q: Tensor,
    k: Tensor,
    steps: int,
    budget: TileBudget | None,
) -> None:
    grid = fs.Grid(q.shape[2], k.shape[2])
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        made.loss(q, k, grid, Causal(), budget=budget).backward()
        optimizer.step()


def figures(name: str, q: Tensor, k: Tensor) -> dict[str, Kept]:
    """Before training, after it, and after training with the tile budget."""
    tile = TILE[name]
    found = {"untrained": kept(selector(name), q, k, tile)}
    for label, budget in (("trained", None), ("with tile budget", BUDGET[name])):
        made = selector(name)
        train(made, q[:, :, :TRAINED], k[:, :, :TRAINED], STEPS[name], budget)
        found[label] = kept(made, q, k, tile)
    return found


def main() -> None:
    q, k = sample()
    print("                                     mass kept, trained on / not   tiles   inflation")
    bars = {
        "lightning indexer": OracleTopK(block=1, q_block=1, keep=64, heads="shared"),
        "seer gate": OracleTopK(block=16, q_block=16, keep=8, heads="kv"),
    }
    for name, oracle in bars.items():
        started = time.perf_counter()
        rows = {"oracle": kept(oracle, q, k, TILE[name])} | figures(name, q, k)
        for label, row in rows.items():
            title = f"{name}, {label}"
            print(
                f"{title:36} {row.seen:12.3f} / {row.unseen:.3f} {row.tiles:16} {row.inflation:11.2f}"
            )
        print(f"{'':36} {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
