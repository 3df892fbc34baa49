"""What tests of experiments share: a small one, and how it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexsparse.errors import ConfigError
from flexsparse.experiment.load import Experiment, load

SMALL = """
name: small
input: {random: {heads: 4, kv_heads: 2, q_len: 80, head_dim: 16}}
repeats: 1
rows:
  - {name: dense, rule: causal}
  - {name: window, rule: {sliding_window: {size: 8}}, tile: 16}
  - {name: quest, rule: causal, select: {quest: {block: 16, keep: 2, q_block: 16}}, tile: [16, 32]}
"""

EVERY_NTH = """
from dataclasses import dataclass
from flexsparse import MaskRule

@dataclass(frozen=True, eq=False)
class EveryNth(MaskRule):
    n: int

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx % self.n == 0
"""


def written(tmp_path: Path, text: str, *overrides: str) -> Experiment:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load(file, overrides)


def refused(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error, without the folder."""
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text, *overrides)
    return [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
