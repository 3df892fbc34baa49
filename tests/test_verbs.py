"""show and compare on the command line: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import Shell, shell  # noqa: F401

from flexsparse.verbs import terminal
from flexsparse.verbs.compare import KEEPS, PERPLEXITY, cell, differences, read_run, used

CONFIG = """
name: pictured
input: {random: {heads: 4, kv_heads: 2, q_len: 48, head_dim: 16}}
rows:
  - {name: window, rule: {sliding_window: {size: 8}}, tile: 16}
  - {name: chosen, rule: causal, select: {quest: {block: 8, keep: 2, q_block: 8}}, tile: 16}
  - {name: everything}
"""


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_show_a_rule(shell: Shell) -> None:  # noqa: F811
    code, out, _ = shell("show", "sliding_window", "size=3")
    assert code == 0
    assert out.startswith("SlidingWindow(size=3)\n64 queries x 64 keys; 189 pairs seen (4.6%)")
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = shell("show", "causal", "--tokens", "1", "--keys", "90", "--tile", "32")
    assert code == 0 and "1 query x 90 keys; 90 pairs seen (100.0%), 3 full" in out


def test_show_a_rule_as_configurations_write_it(shell: Shell) -> None:  # noqa: F811
    rule = "{and: [causal, {not: {sliding_window: {size: 2}}}]}"
    code, out, _ = shell("show", rule, "--tokens", "4")
    assert code == 0 and out.startswith("Causal() & ~SlidingWindow(size=2)\n")
    assert "; 3 pairs seen" in out


def test_show_a_selector(shell: Shell) -> None:  # noqa: F811
    code, out, _ = shell("show", "quest", "block=8", "keep=2", "q_block=8", "--head", "1")
    assert code == 0
    assert out.startswith("Causal(), at most 2 of 8 blocks of 8 keys for each 8 queries, head 1\n")


def test_show_a_long_rule(shell: Shell) -> None:  # noqa: F811
    code, out, _ = shell("show", "sliding_window", "size=4096", "--tokens", "131072")
    assert code == 0 and "131,072 queries x 131,072 keys; about 5" in out
    assert "half character is 1,920 x 1,920 pairs, sampled" in out.replace("\n", " ")


def test_show_a_configuration(shell: Shell) -> None:  # noqa: F811
    (shell.folder / "pictured.yaml").write_text(CONFIG)
    code, out, _ = shell("show", "pictured.yaml", "rows.0.rule.sliding_window.size=4")
    assert code == 0
    assert [
        line for line in out.splitlines() if line.startswith(("window", "chosen", "every"))
    ] == [
        "window: SlidingWindow(size=4)",
        "chosen: Causal(), at most 2 of 6 blocks of 8 keys for each 8 queries, head 0",
        "everything: no rule",
    ]
    code, out, _ = shell("show", "pictured.yaml", "--row", "chosen", "--head", "3")
    assert code == 0 and out.startswith("Causal(), at most") and "head 3" in out


def test_show_draws_the_tiles_of_the_run(shell: Shell) -> None:  # noqa: F811
    """Where the plan weighs, a row without a tile of its own is not shown with the default one."""
    quest = "{quest: {block: 16, keep: 3, q_block: 16}}"
    (shell.folder / "long.yaml").write_text(
        "name: long\ninput: {random: {heads: 6, kv_heads: 2, q_len: 500, head_dim: 32}}\nrepeats: 1\n"
        f"rows:\n  - {{name: a, rule: causal, select: {quest}}}\n  - {{name: b, rule: causal}}\n"
        "  - {name: c, rule: causal, tile: 32}\n"
    )
    code, _, _ = shell("run", "long.yaml", "check=16")
    rows = [
        json.loads(x) for x in (shell.folder / "results/long/rows.jsonl").read_text().splitlines()
    ]
    assert code == 0 and len({tuple(row["tile"]) for row in rows}) == 3
    for row in rows:
        _, out, _ = shell("show", "long.yaml", "--row", row["name"])
        assert "tiles of {}x{}".format(*row["tile"]) in " ".join(out.split())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_show_writes_a_file(shell: Shell, suffix: str) -> None:  # noqa: F811
    (shell.folder / "pictured.yaml").write_text(CONFIG)
    for shown in (["causal", "--dark"], ["pictured.yaml"]):
        code, out, _ = shell("show", *shown, "--out", f"a.{suffix}")
        assert (code, out) == (0, f"a.{suffix}\n")
        start = (shell.folder / f"a.{suffix}").read_bytes()[:60]
        assert b"PNG" in start if suffix == "png" else b"<?xml" in start


WRONG = [
    (["show", "causl"], "no rule, score or selector is named 'causl' (did you mean 'causal'?)"),
    (["show", "causl"], "or a configuration, CONFIG.yaml"),
    (["show", "absent.yaml"], "there is no file absent.yaml"),
    (["show", "./absent.py:X"], "there is no file ./absent.py"),
    (["show", "softcap", "cap=2.0"], "softcap is a score, which hides nothing"),
    (["show", "causal", "--out", "a.gif"], "--out must end in .png, .svg, .pdf, got a.gif"),
    (["show", "causal", "--out", "no/a.png"], "cannot write no/a.png: No such file"),
    (["show", "causal", "--row", "a"], "causal has none"),
    (["show", "small.yaml", "--row", "windo"], "(did you mean 'window'?); it has window"),
    (["show", "small.yaml", "--tokens", "9"], "leave out --tokens"),
    (
        ["show", "small.yaml", "--tile", "32"],
        "leave out --tile, or set that of a row, rows.0.tile=32",
    ),
    (["show", "small.yaml", "--head", "2"], "--head must be one of 0 to 1, got 2"),
    (
        ["show", "causal", "--tokens", "0"],
        "for '--tokens': Input should be greater than or equal to 1",
    ),
    (["show", "quest", "--tokens", "131072"], "a selector is shown on at most 268,435,456 pairs"),
    (["show", "{and: [causl]}"], "no rule is named 'causl'"),
    (["show", "{and: [causal]}", "size=3"], "write them into it"),
    (["compare", "a", "b"], "there is no finished run at a: compare takes a results folder"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_what_the_user_can_mend_is_one_sentence(
    shell: Shell,  # noqa: F811
    arguments: list[str],
    words: str,
) -> None:
    code, out, err = shell(*arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("encoding", "tty", "environ", "wanted"),
    [("utf-8", True, {}, "colour"), ("utf-8", False, {}, "half"), ("ascii", True, {}, "ascii"),
     ("utf-8", True, {"NO_COLOR": "1"}, "half"), ("utf-8", True, {"TERM": "dumb"}, "half")],
)  # fmt: skip
def test_the_style_is_what_the_terminal_can(
    monkeypatch: pytest.MonkeyPatch, encoding: str, tty: bool, environ: dict[str, str], wanted: str
) -> None:
    class Out:
        def isatty(self) -> bool:
            return tty

    Out.encoding = encoding  # type: ignore[attr-defined]
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Out())
    assert terminal.style() == wanted


def test_ascii_where_the_encoding_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexsparse", "show", "causal", "--tokens", "20"],
        capture_output=True, env={"PYTHONIOENCODING": "ascii", "PATH": "", "COLUMNS": "60"},
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii").count("#") == 16 * 4 + 1  # and the legend's


def record(name: str, **values: object) -> dict[str, object]:
    return {"name": name, "status": "ok", "error": None} | values


def left(folder: Path, rows: list[dict[str, object]], config: str, box: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps(box))
    return folder


def test_compare_two_runs(shell: Shell) -> None:  # noqa: F811
    quantities = {"out": {"error": 1.0, "budget": 4.0}, "lse": {"error": 3.0, "budget": 4.0}}
    a = record(
        "both", mass_kept=0.5, output_error=0.5, check={"quantities": quantities}, delivered=0.25,
        budget={"inflation": 2.0, "logical_pairs": 100}, time_ms={"kernel": 2.0, "total": 4.0},
        dense={"ms": 1.0},
    )  # fmt: skip
    b = a | {
        "mass_kept": 0.25, "output_error": 0.25, "budget": {"inflation": 2.0, "logical_pairs": 50},
        "time_ms": {"kernel": 1.0, "total": 4.0},
    }  # fmt: skip
    config = "name: one\nseed: {}\nrows: [{{name: both, tile: {}}}, {{name: x}}]\n"
    left(shell.folder / "a", [a, record("x")], config.format(0, 64), {"torch": "1", "cpu": "c"})
    left(shell.folder / "b", [b, record("y") | {"status": "failed"}], config.format(1, 32),
         {"torch": "2", "cpu": "c"})  # fmt: skip
    code, out, err = shell("compare", "a", "b/rows.jsonl")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "seed: 0 → 1" in lines and "rows.both.tile: 64 → 32" in lines
    assert "torch: 1 → 2" in lines and not any("cpu" in line for line in lines)
    assert "both 0.5 → 0.25 0.5 → 0.25 0.75 2 0.5x" in lines
    assert "both 0.5x 1x 1x 0.25" in lines
    assert lines[-2:] == ["Only in A: x", "Only in B: y"]


def test_rows_whose_names_begin_alike(shell: Shell) -> None:  # noqa: F811
    """What differs is told of the row that both have, though one run alone has what its name begins with."""
    config = "name: one\nrows: [{{name: v1, tile: 16}}, {{name: v1.5, tile: {}}}]\n"
    left(shell.folder / "a", [record("v1"), record("v1.5")], config.format(64), {"cpu": "c"})
    left(shell.folder / "b", [record("v1.5")], config.format(32), {"cpu": "c"})
    code, out, _ = shell("compare", "a", "b")
    assert code == 0 and "rows.v1.5.tile: 64 → 32" in out and "rows.v1.tile" not in out


def test_a_hundredth_of_a_perplexity_is_told() -> None:
    a, b = ({"perplexity": {"value": value}} for value in (1410.94, 1410.95))
    assert cell(PERPLEXITY, a, b) == "1,410.94 → 1,410.95"
    assert cell(PERPLEXITY, a, {}) == "1,410.94 → –"  # noqa: RUF001


def test_compare_real_runs_and_failed_rows(shell: Shell) -> None:  # noqa: F811
    assert shell("run", "small.yaml", "--out", "a")[0] == 0
    assert shell("run", "small.yaml", "rows.0.score={alibi: {slopes: [1.0]}}", "--out", "b")[0] == 1
    code, out, _ = shell("compare", "a", "b")
    assert code == 0 and "window: ok → failed" in out
    assert "rows.window.score.alibi.slopes: absent → [1.0]" in out and "Same environment" in out
    run = read_run("a")
    row = run.rows["window"]
    assert cell(KEEPS[-1], row, row) == "1x"
    worst = max(q["error"] / q["budget"] for q in row["check"]["quantities"].values())
    assert used(row) == worst
    assert cell(KEEPS[2], row, read_run("b").rows["window"]).endswith("→ –")  # noqa: RUF001


def test_differences_are_by_path() -> None:
    assert differences({"a": 1, "b": None}, {"a": 1, "c": "x"}) == [
        ("b", "null", "absent"),
        ("c", "absent", "x"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no finished row"), ("{\n", ":1: is not a row"), ('{"a": 1}\n', ":1: is not a row"),
     ("[]\n", ":1: is not a row")],
)  # fmt: skip
def test_broken_rows_are_named(shell: Shell, text: str, words: str) -> None:  # noqa: F811
    left(shell.folder / "a", [], "", {})
    (shell.folder / "a" / "rows.jsonl").write_text(text)
    code, _, err = shell("compare", "a", "a")
    assert code == 2 and words in err and err.count("\n") == 1


def test_a_run_of_rows_alone(shell: Shell) -> None:  # noqa: F811
    (shell.folder / "rows.jsonl").write_text(json.dumps(record("x")) + "\n")
    code, out, _ = shell("compare", "rows.jsonl", "rows.jsonl")
    assert code == 0 and "The configuration of A and B is not known." in out
