"""The shipped comparisons: what they promise of their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import flexsparse as fs
from flexsparse.experiment.inputs import SAMPLES
from flexsparse.experiment.load import load
from flexsparse.masks import AttentionSink, Causal, SlidingWindow
from flexsparse.selectors import (
    H2O,
    FlexPrefill,
    MInference,
    OracleTopP,
    Retrieval,
    SnapKV,
    SpargeAttn,
    Twilight,
    VerticalSlashBlocks,
    XAttention,
)  # fmt: skip

CONFIGS = Path(__file__).parent.parent / "configs"

# Their budget is a threshold, or tokens wherever they lie.
UNCOUNTED = (
    H2O, FlexPrefill, MInference, OracleTopP, Retrieval, SnapKV, SpargeAttn, Twilight,
    VerticalSlashBlocks, XAttention,
)  # fmt: skip


@pytest.mark.parametrize("name", ["compare_in_a_model", "compare_at_8192"])
def test_every_count_is_the_tiles_of_a_window_with_sinks(name: str) -> None:
    found = load_file(SAMPLES / "smollm2_layer.safetensors")
    q, k = (found[x].float() for x in "qk")
    grid, heads = fs.Grid(q.shape[2], k.shape[2]), (q.shape[1], k.shape[1])

    def tiles(rule: fs.MaskRule, select: fs.Selection | None = None) -> int:
        layout = fs.build_layout(
            rule=rule, select=select, grid=grid, heads=heads, block_size=(64, 64)
        )
        return int(layout.budget().physical_tiles)

    experiment = load(CONFIGS / f"{name}.yaml")
    assert experiment.config.perplexity
    allowed = {
        64 * (n + 2): tiles(Causal() & (SlidingWindow(64 * n) | AttentionSink(4))) for n in (8, 2)
    }
    counted = 0
    for case in experiment.cases:
        assert case.row.tile == 64
        if case.select is None or isinstance(case.select, UNCOUNTED) or case.select.block == 1:
            continue
        chosen = case.select.select(q, k, grid, case.rule)
        limit = allowed[int(case.row.name.split()[-1])]
        # Hashes and clusters may find fewer blocks than they may keep.
        assert 0.9 * limit <= tiles(Causal(), chosen) <= limit, case.row.name
        counted += 1
    assert counted >= 12


def test_a_threshold_is_given_to_two_budgets_apart() -> None:
    """The tighter one is the lower."""
    made = {case.row.name: case.select for case in load(CONFIGS / "compare_in_a_model.yaml").cases}
    for name, field in (("sparge_attn", "mass"), ("xattention", "tau"), ("flex_prefill", "gamma")):
        assert getattr(made[f"{name} 256"], field) < getattr(made[f"{name} 640"], field)
    assert torch.tensor([made["twilight 256"].mass, made["twilight 640"].mass]).diff() > 0
