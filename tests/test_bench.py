"""The bench: its configuration, what stands in its rows, and what it is held against."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flexsparse.bench.config import KINDS, load
from flexsparse.bench.example import EXAMPLE
from flexsparse.bench.problems import problem
from flexsparse.bench.run import PAIR_BY_PAIR, run
from flexsparse.bench.table import OURS
from flexsparse.cli import main
from flexsparse.device import clock
from flexsparse.errors import ConfigError
from flexsparse.kernels.compress import expand
from flexsparse.measure import torch_masks
from flexsparse.measure.baselines import BASELINES, measured
from flexsparse.measure.contender import Contender
from flexsparse.measure.conversion import Conversion, conversion
from flexsparse.measure.draws import page_scores, past_blocks, past_tokens
from flexsparse.measure.torch_masks import (
    compiled_create_block_mask,
    eager_lists,
    from_kv_blocks,
)
from flexsparse.measure.workloads import documents, head_windows

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = """
name: small
dtype: float32
head_dim: 16
baselines: [from_kv_blocks, eager lists, attn_gym, flashinfer]
rows:
  - name: blocks
    attention: true
    blocks: {length: 300, heads: 4, kv_heads: 2, keep: 2}
  - {name: decode, attention: true, decode: {batch: 2, length: 500, heads: 4, kv_heads: 2, keep: 3}}
  - {name: tokens, tokens: {length: 256, heads: 2, kv_heads: 1, keep: 8}}
  - name: windows
    rule:
      of: {"flexsparse.measure.workloads:head_windows": {heads: 2, smallest: 16, largest: 64}}
      heads: 2
      kv_heads: 2
      length: 256
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call is timed instead of many."""
    monkeypatch.setattr(clock, "_median", clock._once)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing optional is installed."""
    for package in ("attn_gym", "flashinfer"):
        monkeypatch.setitem(sys.modules, package, None)


def made(text: str, tmp_path: Path, row: int = 0) -> Conversion:
    path = tmp_path / "one.yaml"
    path.write_text(text)
    bench = load(path)
    config = bench.config
    given = problem(config.rows[row], bench.rules[row], config, CPU)
    return conversion(given, attention=False, seed=0)


# ---- the verb


@pytest.mark.usefixtures("quick", "absent")
def test_the_verb_from_yaml_to_rows_and_tables(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "argv", ["flexsparse", "bench", "small.yaml", "rows.0.blocks.keep=1"])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert left.value.code == 0
    assert [line.split(":")[0] for line in said.err.splitlines()] == [
        "1/4 blocks [blocks.keep=1]", "2/4 decode", "3/4 tokens", "4/4 windows"
    ]  # fmt: skip
    for word in (
        OURS,
        "eager lists",
        "look ahead",
        "of copy bandwidth",
        "promised",
        "and backward",
    ):
        assert word in said.out
    assert "flashinfer is not installed" in said.out and "graph" not in said.out
    out = file.parent / "results" / "small"
    assert {p.name for p in out.iterdir()} == {"config.yaml", "environment.json", "rows.jsonl"}
    around = json.loads((out / "environment.json").read_text())
    assert around["ceilings"]["copy_bytes_per_s"] > 0 and around["packages"].keys() >= {"triton"}
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert rows[0]["problem"]["keep"] == 1
    assert load(out / "config.yaml").config == load(file, ["rows.0.blocks.keep=1"]).config
    for row in rows:
        _complete(row)
    assert rows[0]["attention"].keys() >= {"forward", "training"}
    assert "training" not in rows[1]["attention"] and rows[2]["attention"] is None


def _complete(row: dict[str, Any]) -> None:
    assert row["status"] == "ok" and row["error"] is None
    assert row["ours"]["eager_ms"] > 0 and row["ours"]["no_graph"] == "no CUDA device"
    assert row["kept_bytes"] > 0 and row["copy_share"] > 0
    for baseline in row["baselines"]:
        assert (baseline["cost"] is None) != (baseline["reason"] is None)
    found = {b["name"]: b for b in row["baselines"]}
    assert found["from_kv_blocks"]["cost"]["eager_ms"] > 0
    assert (found["eager lists"]["cost"] is None) == (row["kind"] == "rule")
    assert (row["look_ahead"] is None) == (row["kind"] != "rule")
    for mode in {"forward", "training"} & (row["attention"] or {}).keys():
        part = row["attention"][mode]
        assert math.prod(part["factors"].values()) == pytest.approx(part["delivered"])
        assert part["delivered"] == pytest.approx(part["got"] / part["promised"])
        assert part["got"] == part["dense"]["ms"] / part["time_ms"]["total"]


@pytest.mark.usefixtures("quick", "absent")
def test_a_row_that_fails_is_kept_and_the_rest_goes_on(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(made: Conversion) -> Contender:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(BASELINES, "from_kv_blocks", broken)
    windows = 'rows.3.rule.of={"flexsparse.measure.workloads:head_windows": {heads: 1, smallest: 16, largest: 64}}'
    rows = run(load(file, ["rows.0.attention=false", windows]), tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "failed"]
    assert rows[0]["baselines"][0]["reason"] == "RuntimeError: no such kernel"
    assert rows[3]["ours"] is None and "rule windows" in rows[3]["error"]
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 4


# ---- configurations


def test_every_mistake_is_told_at_its_place(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("""\
name: x
baselines: [from_kv_block]
rows:
  - {name: a, blocks: {length: 0, keep: 2, lenght: 3}}
  - {name: a, decode: {keep: 2, heads: 3, kv_heads: 2, length: 8}}
  - {name: c}
  - {name: d, tokens: {length: 8, keep: 1}, decode: {length: 8, keep: 1}}
  - name: e
    rule:
      of: {sliding_window: {size: 0}}
      length: 64
      tile: 8
""")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "c.yaml")
    told = [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]
    starts = [
        "c.yaml:2:13: baselines.0: must be from_kv_blocks, eager lists",
        "c.yaml:4:24: rows.0.blocks.length: must be at least 1, got 0",
        "c.yaml:4:44: rows.0.blocks.lenght: unknown key (did you mean 'length'?); known are heads",
        "c.yaml:5:15: rows.1.decode: heads must be a multiple of kv_heads, got 3 and 2",
        "c.yaml:6:5: rows.2: needs exactly one of blocks, nsa, decode, tokens, rule, ragged, selector, linear, got none",
        "c.yaml:7:5: rows.3: needs exactly one of blocks, nsa, decode, tokens, rule, ragged, selector, linear, got decode and tokens",
        "c.yaml:10:29: rows.4.rule.of.sliding_window.size: SlidingWindow size must be at least 1",
        "c.yaml:12:7: rows.4.rule.tile: must be at least 16, got 8",
    ]
    assert len(told) == len(starts), told
    for line, start in zip(told, starts, strict=True):
        assert line.startswith(start)


def test_two_rows_of_one_name(file: Path) -> None:
    with pytest.raises(ConfigError, match="rows.1.name=blocks': rows.1.name: two rows are named"):
        load(file, ["rows.1.name=blocks"])


@pytest.mark.parametrize("name", ["worktable", "spine"])
def test_the_configurations_that_come_along(name: str) -> None:
    bench = load(ROOT / "configs" / "bench" / f"{name}.yaml")
    kinds = {row.kind for row in bench.config.rows}
    assert kinds == {"blocks", "decode", "tokens", "rule"}
    assert all(row.attention for row in bench.config.rows) == (name == "spine")


# ---- problems


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_blocks_are_of_the_past_and_hold_the_own() -> None:
    blocks = past_blocks(100, 2, 16, 8, 4, draw())
    assert blocks.shape == (1, 2, 7, 4)
    for row in range(7):
        own = (min(16 * (row + 1), 100) - 1) // 8
        for kept in blocks[0, :, row].tolist():
            named = [i for i in kept if i >= 0]
            assert own in named and max(named) == own and len(set(named)) == len(named)
            assert len(named) == min(4, own + 1)


def test_pages_and_tokens() -> None:
    assert page_scores(2, 3, 10, draw()).shape == (2, 3, 1, 10)
    tokens = past_tokens(50, 8, draw())
    assert tokens.shape == (1, 1, 50, 8) and tokens.min() >= 0
    assert bool((tokens <= torch.arange(50)[:, None]).all())


def test_rules_of_a_size() -> None:
    ids = documents(64, 5, seed=3).document_of
    assert len(ids) == 64 and ids.unique().tolist() == [0, 1, 2, 3, 4]
    assert bool((ids.diff() >= 0).all())
    rule = head_windows(2, 1, 4)
    b = torch.tensor(0)
    q, kv = torch.arange(6)[:, None], torch.arange(6)[None]
    counts = [int(rule(b, torch.tensor(h), q, kv).sum()) for h in (0, 1)]
    assert counts == [6, 6 * 4 - (1 + 2 + 3)]


# ---- what it is held against makes the same tiles


@pytest.mark.parametrize("row", range(4), ids=["blocks", "decode", "tokens", "windows"])
def test_from_kv_blocks_is_given_our_tiles(row: int, tmp_path: Path) -> None:
    conv = made(SMALL, tmp_path, row)
    contender = from_kv_blocks(conv)
    _same_tiles(contender.call(), conv)
    assert ("unwanted" in contender.note) == (conv.layout.columns is None)


@pytest.mark.parametrize("row", [0, 1, 2], ids=["blocks", "decode", "tokens"])
def test_eager_lists_name_the_same_tiles(row: int, tmp_path: Path) -> None:
    conv = made(SMALL, tmp_path, row)
    _same_tiles(eager_lists(conv).call(), conv)


@pytest.mark.parametrize(
    "blocks",
    ["q_block: 32, kv_block: 16", "q_block: 256, kv_block: 128", "q_block: 128, kv_block: 512"],
)
def test_eager_lists_of_blocks_that_nest_in_tiles_or_around(blocks: str, tmp_path: Path) -> None:
    text = f"""
name: x
dtype: float32
rows:
  - {{name: a, blocks: {{length: 1000, heads: 4, kv_heads: 2, keep: 5, {blocks}}}}}
"""
    conv = made(text, tmp_path)
    _same_tiles(eager_lists(conv).call(), conv)


def _same_tiles(mask: object, conv: Conversion) -> None:
    assert isinstance(mask, BlockMask)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    columns = conv.layout.span.tiles[1]
    partial = expand(mask.kv_num_blocks, mask.kv_indices, columns)
    full = expand(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    ours = conv.layout.tile_maps()
    assert torch.equal(partial, ours[0]) and torch.equal(full, ours[1])
    if conv.layout.columns is not None:
        assert mask.q_num_blocks is not None
        assert torch.equal(mask.q_num_blocks, conv.layout.columns.partial_num)


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 2, 3], ids=["blocks", "tokens", "windows"])
def test_create_block_mask_names_the_same_tiles(row: int, tmp_path: Path) -> None:
    # Ragged tiles it calls partial, also where every pair that exists is allowed.
    conv = made(SMALL.replace("length: 300", "length: 384"), tmp_path, row)
    _same_tiles(compiled_create_block_mask(conv).call(), conv)


def test_a_mask_that_would_not_fit_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = made(SMALL, tmp_path, 2)
    monkeypatch.setattr(torch_masks, "free_bytes", lambda device: 256 * 256 - 1)
    found = measured("create_block_mask", conv)
    assert found["cost"] is None and "a byte for each of its pairs" in found["reason"]


@pytest.mark.usefixtures("quick")
def test_what_is_installed_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vsa = ModuleType("attn_gym.masks.vsa")
    given: list[Any] = []
    monkeypatch.setattr(vsa, "create_vsa_block_mask", lambda *a: given.append(a), raising=False)
    for name in ("attn_gym", "attn_gym.masks", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "attn_gym.masks.vsa", vsa)
    text = SMALL.replace("length: 300", "length: 512")
    found = measured("attn_gym", made(text, tmp_path))
    assert found["cost"]["eager_ms"] > 0 and found["reason"] is None
    indices, tile, columns = given[0]
    assert indices.shape == (2, 1, 4, 2) and indices.min() >= 0 and (tile, columns) == (128, 4)
    assert "whole square tiles" in measured("attn_gym", made(SMALL, tmp_path, 1))["reason"]
    assert measured("flashinfer", made(SMALL, tmp_path))["reason"] == "it needs a CUDA device"


# ---- bytes


def test_bytes_are_counted_by_hand(tmp_path: Path) -> None:
    conv = made(SMALL, tmp_path)
    # Two folded lists over 3x3 tiles: counts and indices, twice, by row and by column; no words.
    width = conv.layout.kv_indices.shape[-1]
    lists = 4 * 2 * 2 * (3 + 3 * width) + 4 * 2 * 2 * (3 + 3 * 3)
    assert conv.fewest_bytes == lists + 8 * 2 * 3 * 2
    tokens = made(SMALL, tmp_path, 2)
    # Both heads stand beside their queries, in as many rows of tiles as the plan found best.
    count, width = tokens.layout.kv_indices.shape[2:]
    rows = 4 * 2 * count * (1 + width)
    assert tokens.fewest_bytes == rows + 4 * (256 // 32) * 256 + 8 * 256 * 8


@pytest.mark.gpu
@pytest.mark.usefixtures("quick")
def test_on_a_device_ours_runs_in_a_graph(file: Path, tmp_path: Path, device: torch.device) -> None:
    bench = load(file, ["dtype=bfloat16", "head_dim=64", "device=cuda"])
    rows = run(bench, tmp_path / "out")
    for row in rows:
        assert row["status"] == "ok", row["error"]
        assert row["ours"]["peak_bytes"] > 0 and row["ours"]["wall_ms"] > 0
    for row in rows[:3]:
        assert row["ours"]["no_graph"] is None and row["ours"]["graph_ms"] > 0
    of_rule = rows[3]["ours"], rows[3]["look_ahead"]
    assert [cost["no_graph"] for cost in of_rule] == [PAIR_BY_PAIR] * 2


def test_the_example_of_help_is_valid_and_has_every_kind(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXAMPLE)
    rows = load(tmp_path / "mine.yaml").config.rows
    assert {row.kind for row in rows} == set(KINDS)
