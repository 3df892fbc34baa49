"""Rows with ways: the choice beside all others and beside its prediction, and rates from what was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from flexsparse import ways as weighing
from flexsparse.backends import Work, flex, tiles
from flexsparse.bench.config import load
from flexsparse.bench.problems import problem
from flexsparse.bench.run import run
from flexsparse.bench.table import print_tables
from flexsparse.cost import Gathered, Job, Pairs, Read, Tiles, predicted_ms
from flexsparse.device import Ceilings, clock
from flexsparse.errors import ConfigError
from flexsparse.measure import calibration, tried
from flexsparse.measure.calibration import Point, calibrated, near, points
from flexsparse.planning import make_plan
from flexsparse.rates import RATES, Rates

CPU = torch.device("cpu")
BOX = Ceilings(4.24e12, 795e12, 132)
SMALL = """
name: small
dtype: float32
head_dim: 16
baselines: []
checked: 16
rows:
  - name: moba
    ways: all
    selector:
      of: {moba: {block: 32, keep: 3, q_block: 32, heads: kv}}
      length: 200
      heads: 4
      kv_heads: 2
  - {name: nsa, ways: chosen, nsa: {length: 128, heads: 4, kv_heads: 2, block: 16, keep: 3, training: true}}
  - {name: decode, ways: chosen, head_dim: 32, decode: {batch: 2, length: 512, heads: 4, kv_heads: 2, keep: 3}}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call is timed instead of many."""
    monkeypatch.setattr(clock, "_median", clock._once)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_every_way_is_timed_and_right(file: Path, workers: int) -> None:
    records = run(load(file), file.parent / "out", workers=workers)
    assert [(r["name"], r["status"]) for r in records] == [
        ("moba", "ok"), ("nsa", "ok"), ("decode", "ok")
    ]  # fmt: skip
    moba, nsa, decode = (r["ways"] for r in records)
    named = {(w["backend"], w["pack"], *w["tile"]) for w in moba["ways"]}
    assert len(named) == len(moba["ways"]) and {n[0] for n in named} == {"tiles", "gather", "dense"}
    assert {n[1] for n in named} == {"fold", "pack"}
    assert moba["best"]["ms"] == min(w["ms"] for w in moba["ways"])
    assert moba["over_best"] == moba["chosen"]["ms"] / moba["best"]["ms"] >= 1
    assert moba["check"]["ok"] and moba["check"]["rows"] == 16
    assert all(w["difference"] <= 2 * moba["check"]["budget"] for w in moba["ways"])
    assert nsa["mode"] == "training" and len(nsa["ways"]) == len(decode["ways"]) == 1
    said = io.StringIO()
    print_tables(records, Console(file=said, width=160))
    assert "All ways tried" in said.getvalue() and "Predicted over measured" in said.getvalue()


def test_a_way_that_is_wrong_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tiles.run

    def wrong(work: Work) -> tuple[Tensor, Tensor | None]:
        out, lse = right(work)
        return out + (work.layout.block_size == (64, 64)), lse

    monkeypatch.setattr(tiles, "run", wrong)
    record = run(load(file), file.parent / "out")[0]
    assert record["status"] == "wrong"


def test_ways_stand_alone(file: Path) -> None:
    with pytest.raises(ConfigError, match="leave attention out"):
        load(file, ["rows.1.attention=true"])


CASES = [
    ("{blocks: {length: 512, keep: 2}}", ("flex", None, None), Tiles),
    ("{blocks: {length: 512, keep: 2, training: false}}", ("flex", "pack", (64, 64)), Tiles),
    ("{nsa: {length: 256, shared: 2}}", ("flex", None, (64, 128)), Tiles),
    ("{nsa: {length: 256, shared: 2}}", ("gather", None, None), Gathered),
    ("{rule: {of: {sliding_window: {size: 99}}, length: 512, training: true}}", ("flex", None, None), Tiles),
    ("{rule: {of: causal, length: 512}}", ("dense", None, None), Pairs),
    ("{decode: {batch: 2, length: 1024, keep: 8}}", ("decode", None, None), Read),
]  # fmt: skip


@pytest.mark.parametrize(("row", "asked", "kind"), CASES)
def test_what_was_predicted_is_found_again(
    row: str, asked: Any, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device that is not here: the counts alone are looked at."""
    monkeypatch.setattr(weighing, "ceilings", lambda device, dtype: BOX)
    monkeypatch.setattr(flex, "refuses", lambda call: None)
    monkeypatch.setattr(tried, "weighs", lambda call: call.q_len > 1)
    monkeypatch.setattr(tried, "predicts", lambda device: True)
    (tmp_path / "c.yaml").write_text(
        f"name: x\nrows:\n  - {{name: a, ways: chosen, {row[1:-1]}}}\n"
    )
    bench = load(tmp_path / "c.yaml")
    given = problem(bench.config.rows[0], bench.rules[0], bench.config, CPU)
    qkv = given.qkv(0)
    backend, pack, tile = asked
    plan = make_plan(
        *qkv, rule=given.rule, select=given.select(), backend=backend, pack=pack, tile=tile
    )
    way = tried._way(given, plan, qkv, tried._weighed(given, plan, qkv))
    assert way is not None and way.job is not None and way.ms > 0
    assert type(way.job.counts) is kind and way.job.grads == given.training
    if isinstance(way.job.counts, Tiles):
        listed = plan.layout(given.select()).budget().physical_tiles
        # The rule is not asked when candidates are counted; tiles of it alone are counted exactly.
        assert way.job.counts.number >= listed or given.select() is not None
        if given.select() is None:
            assert way.job.counts.number == listed
    said = json.loads(json.dumps(tried._plain(way)))
    assert calibration._job(said) == way.job
    assert predicted_ms(way.job, BOX) == way.ms


def test_rates_are_found_again() -> None:
    true = Rates(flash=0.6, flex_back=0.5, decode=0.7, launch=9e-6, gather=0.3)
    draw = torch.Generator().manual_seed(0)
    given = []
    for i in range(60):
        size = float(10 ** (2 + 3 * torch.rand((), generator=draw)))
        counts = [
            Tiles(size, 128, 128),
            Tiles(size, 128, 64),
            Gathered(1e3 * size, 64, 16),
            Read(1e2 * size),
        ][i % 4]
        job = Job(("flash", "flex", "gather", "decode")[i % 4], counts, (128, 128), 2, i % 8 < 3)
        given.append(Point(str(i), job, BOX, predicted_ms(job, BOX, true), chosen=i % 2 == 0))
    found = calibrated(given)
    assert near(given, RATES) < 0.95 and near(given, found) == 1
    assert found.tokens_all == RATES.tokens_all, "nobody asked"


def test_points_come_from_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job("flex", Tiles(1e5, 64, 128, 1e4, 64), (128, 64), 2, True)
    counts = {"kind": "Tiles"} | job.counts._asdict()
    way = {"backend": "flex", "tile": [64, 128], "pack": "fold", "ms": 2.0, "predicted_ms": 1.0}
    way |= {"job": job._asdict() | {"counts": counts, "dims": [128, 64]}}
    record = {"name": "a", "ways": {"box": BOX._asdict(), "ways": [way, way | {"job": None}]}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps({"name": "b", "ways": None}) + "\n")
    found = points([path])
    assert [(p.job, p.box, p.ms, p.chosen) for p in found] == [(job, BOX, 2.0, True)]
    calibration.main([str(path)])
    assert "after: 100% of 1 choices" in capsys.readouterr().out
