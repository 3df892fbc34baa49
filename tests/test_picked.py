"""Rows that run alone: picked by name, pattern or number, or left out by an override."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments import lines, refused
from test_cli import Shell, shell  # noqa: F401

from flexsparse.bench.config import load as load_bench
from flexsparse.errors import ConfigError
from flexsparse.experiment.load import load

ROWS = """
name: rows
input: {sample: {name: smollm2, tokens: 65}}
repeats: 1
rows:
  - {name: "NSA, S=80", rule: causal}
  - {name: NSA wide, rule: {sliding_window: {size: 8}}, tile: 16}
  - {name: quest, rule: causal, select: {quest: {block: 16, keep: 2, q_block: 16}}, tile: 16}
  - {name: broken, rule: nobody}
"""
BENCH = """
name: bench
dtype: float32
head_dim: 16
baselines: []
rows:
  - {name: "pages, S=500", decode: {length: 500, heads: 4, kv_heads: 2, keep: 3}}
  - {name: "blocks, S=300", blocks: {length: 300, heads: 4, kv_heads: 2, keep: 2}}
  - {name: tokens, tokens: {length: 256, heads: 2, kv_heads: 1, keep: 8}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.yaml"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["0"], ["NSA, S=80"]),
        (["2,0"], ["NSA, S=80", "quest"]),
        (["NSA*"], ["NSA, S=80", "NSA wide"]),
        (["NSA, S=80"], ["NSA, S=80"]),
        (["quest", "1"], ["NSA wide", "quest"]),
        (["quest, NSA wide"], ["NSA wide", "quest"]),
    ],
)
def test_rows_are_picked_in_the_order_of_the_file(
    file: Path, wanted: list[str], found: list[str]
) -> None:
    assert [case.row.name for case in load(file, (), wanted).cases] == found


def test_a_row_that_does_not_run_is_not_looked_at(file: Path) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        load(file)
    made = load(file, ["rows.broken=null", "rows.0=null"])
    assert [case.row.name for case in made.cases] == ["NSA wide", "quest"]
    with pytest.raises(ConfigError, match=r"rows\.2\.tile: tile must be at least 16"):
        load(file, ["rows.quest.tile=3"], ["quest"])


def test_what_no_row_is_named(file: Path) -> None:
    words = r"has no row 'qest' \(did you mean 'quest'\?\); it has 0 'NSA, S=80', 1 'NSA wide'"
    for wanted in (["qest"], ["0,qest"], ["0", "qest"]):
        with pytest.raises(ConfigError, match=words):
            load(file, (), wanted)
    with pytest.raises(ConfigError, match="has no row '7'"):
        load(file, (), ["7"])
    with pytest.raises(ConfigError, match="no row is left to run"):
        load(file, ["rows.quest=null"], ["2"])


def test_a_null_row_of_the_file_itself_is_a_mistake(tmp_path: Path) -> None:
    (said,) = refused(tmp_path, ROWS.replace("nobody}", "causal}\n  - null"))
    assert "rows.4: must be a mapping" in said


def test_run_picks_rows_and_resumes(shell: Shell) -> None:  # noqa: F811
    (shell.folder / "rows.yaml").write_text(ROWS)
    for more in ((), ("--resume",)):
        code, out, _ = shell("run", "rows.yaml", "--rows", "*wide", "--rows", "2", *more)
        assert code == 0 and "quest" in out
        rows = lines(shell.folder / "results" / "rows")
        assert [(row["name"], row["queries"]) for row in rows] == [("NSA wide", 65), ("quest", 65)]


def test_a_part_of_the_sample_is_its_first_tokens(file: Path) -> None:
    import torch

    from flexsparse.experiment.inputs import load_inputs

    device = torch.device("cpu")
    given = load(file, ["input.sample=smollm2"], ["0"]).config.input
    whole = load_inputs(given, torch.float32, device, 0)
    part = load_inputs(load(file, (), ["0"]).config.input, torch.float32, device, 0)
    for x, y in zip(part, whole, strict=True):
        assert x.shape[2] == 65 and torch.equal(x, y[:, :, :65])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "input.sample.tokens=9",
            "write it as a mapping, input.sample='{name: smollm2, tokens: 256}'",
        ),
        ("input.sample={tokens: 1025}", "input.sample.tokens: must be at most 1024, got 1025"),
        ("input.sample={tokens: 0}", "input.sample.tokens: must be at least 1, got 0"),
        ("input.sample=other", "input.sample.name: must be smollm2, got 'other'"),
    ],
)
def test_what_a_sample_cannot_be(file: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, ["input={sample: smollm2}", override], ["0"])
    assert words in str(caught.value)


def test_a_part_of_the_sample_reads_back(file: Path, tmp_path: Path) -> None:
    made = load(file, ["input.sample={tokens: 7}"], ["0"])
    again = tmp_path / "again.yaml"
    again.write_text(made.as_yaml())
    assert load(again).sha256 == made.sha256
    assert load(again).config.input == made.config.input


def test_bench_picks_rows_and_says_what_was_overridden(shell: Shell) -> None:  # noqa: F811
    (shell.folder / "bench.yaml").write_text(BENCH)
    code, out, err = shell(
        "bench", "bench.yaml", "rows.1.blocks.length=200", "rows.1.blocks.keep=1", "rows.2=null",
        "rows.0.name=short", "rows.0.decode.length=100", "--rows", "short,blocks*",
    )  # fmt: skip
    names = [row["name"] for row in lines(shell.folder / "results" / "bench")]
    assert names == ["short", "blocks, S=300 [blocks.length=200, blocks.keep=1]"]
    assert code == 0 and f"2/2 {names[1]}: ok" in err and "length=200" in out


def test_workers_read_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(BENCH)
    bench = load_bench(path, ["rows.0=null"], ["1", "2"])
    again = load_bench(bench.file, bench.overrides, bench.rows)
    assert again.config == bench.config
    assert [row.name for row in bench.config.rows] == ["blocks, S=300", "tokens"]
