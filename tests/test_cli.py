"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from experiments import EVERY_NTH

from flexsparse.bench.example import EXAMPLE
from flexsparse.cli import main
from flexsparse.experiment.form import FORM

SMALL = """
name: small
input: {random: {heads: 2, q_len: 40, head_dim: 16}}
repeats: 1
rows:
  - {name: window, rule: {sliding_window: {size: 8}}, tile: 16}
"""


class Shell:
    """Runs the command line in this process, in a folder of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self._patch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)
        (folder / "small.yaml").write_text(SMALL)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._patch.setattr(sys, "argv", ["flexsparse", *arguments])
        self._patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as left:
            main()
        said = self._capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, said.out, said.err


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_run(shell: Shell) -> None:
    code, out, err = shell("run", "small.yaml")
    assert code == 0 and "1/1 window: ok" in err and " left" not in err
    assert "Baseline (dense attention): Causal(), by " in out and "baseline: Causal()" in out
    assert out.startswith("Did the hardware skip what the algorithm promised?\n")
    assert "mass kept" in out and "x worktable" in out
    assert (shell.folder / "results" / "small" / "report.html").is_file()


def test_run_into_another_folder_with_overrides(shell: Shell) -> None:
    code, _, err = shell("run", "small.yaml", "rows.0.name=other", "check=false", "--out", "there")
    assert code == 0 and "1/1 other: ok" in err
    assert {p.name for p in (shell.folder / "there").iterdir()} >= {"rows.jsonl", "report.html"}
    assert not (shell.folder / "results").exists()


def test_a_failed_row_is_exit_code_1(shell: Shell) -> None:
    code, out, err = shell("run", "small.yaml", "rows.0.score={alibi: {slopes: [1.0]}}")
    assert code == 1 and "1/1 window: failed" in err and "Traceback" not in out + err
    assert '"status": "failed"' in (shell.folder / "results/small/rows.jsonl").read_text()


def test_print_config_runs_nothing(shell: Shell) -> None:
    code, out, _ = shell("run", "small.yaml", "dtype=float64", "--print-config")
    assert code == 0 and "dtype: float64" in out and "check: true" in out
    assert not (shell.folder / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "smal.yaml"], "there is no file smal.yaml (did you mean 'small'?)"),
        (["run", "."], "cannot read .: Is a directory"),
        (
            ["run", "small.yaml", "rows.0.tile=3"],
            "argument 'rows.0.tile=3': rows.0.tile: tile must",
        ),
        (["run", "small.yaml", "--nope"], "No such option: --nope"),
        (["run"], "Missing argument 'CONFIG.yaml'."),
        (["rum"], "No such command 'rum'."),
        (["check", "./absent.py:X"], "there is no file ./absent.py"),
        (["check", "sliding_window"], "sliding_window needs size"),
        (["check", "sliding_window", "size=a"], "size: must be an integer, got 'a'"),
        (["check", "sliding_window", "size=0"], "size: SlidingWindow size must be at least 1"),
        (["check", "sliding_window", "size"], "argument 'size': an override is key=value"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(
    shell: Shell, arguments: list[str], words: str
) -> None:
    code, out, err = shell(*arguments)
    assert code == 2 and out == "" and err.startswith(words) and err.count("\n") == 1


def test_check_a_file(shell: Shell) -> None:
    (shell.folder / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom flexsparse import MaskRule\n"
        "@dataclass(frozen=True, eq=False)\nclass Banded(MaskRule):\n    width: int = 2\n"
        "    def __call__(self, b, h, q_idx, kv_idx):\n"
        "        return (q_idx - kv_idx).abs() < self.width\n"
        "def later(b, h, q_idx, kv_idx):\n    return kv_idx > q_idx\n"
        "def branchy(b, h, q_idx, kv_idx):\n    return kv_idx if q_idx > 0 else q_idx\n"
    )
    code, out, _ = shell("check", "./mine.py:Banded")
    assert code == 0 and out.startswith("Banded(width=2)\n65 queries x 65 keys; 193 pairs seen")
    assert "65 query rows of tiles: ok" in out
    assert "; 65 pairs seen" in shell("check", "./mine.py:Banded", "width=1")[1]
    assert shell("check", "mine:Banded")[0] == 0
    code, out, _ = shell("check", "./mine.py:later")
    assert code == 0 and "dq" in out
    code, _, err = shell("check", "./mine.py:branchy")
    assert code == 2 and "branchy" in err and "Traceback" not in err
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("arguments", [["softcap", "cap=2.0"], ["quest", "block=16", "keep=2"]])
def test_check_a_score_and_a_selector(shell: Shell, arguments: list[str]) -> None:
    code, out, _ = shell("check", *arguments)
    assert code == 0 and "lse" in out and "ok" in out


def test_check_a_selector_that_leaves_something_out(shell: Shell) -> None:
    # 2 of 2 blocks would be kept at 65 tokens.
    code, out, err = shell("check", "quest", "block=32", "keep=4")
    assert code == 0 and err == "" and "at most 4 of 7 blocks" in out and "193 query rows" in out
    code, out, err = shell("check", "quest", "block=32", "keep=4", "--tokens", "100")
    assert code == 0 and "100 query rows" in out
    assert "Warning: nothing was left out" in err and "at 100 tokens" in err
    code, out, err = shell("check", "quest", "block=32", "keep=4", "--tokens", "161")
    assert code == 0 and err == "" and "161 query rows" in out
    code, out, err = shell("check", "causal", "--tokens", "7")
    assert code == 0 and err == "" and "7 query rows" in out


def test_check_a_selector_that_never_leaves_anything_out(shell: Shell) -> None:
    code, out, err = shell("check", "quest", "keep=4000")
    assert code == 0 and "65 query rows" in out and "at 65 tokens" in err


def test_list(shell: Shell) -> None:
    code, out, _ = shell("list")
    assert code == 0
    for word in ("sliding_window", "alibi", "oracle", "tiles", "flex"):
        assert word in out
    assert "no gradients: FlexAttention has no backward on CPU" in out
    for form in (
        "{sliding_window: {size: int}}",
        "{alibi: {slopes: list}}",
        "keep: int or float or {share,",
    ):
        assert form in out
    assert "canvas: list of int" in out and "Ellipsis" not in out
    code, _, err = shell("check", "alibi", "slopes=1,2,3,4")
    assert code == 2 and "slopes: must be a list of numbers, got '1,2,3,4'" in err


def test_resume(shell: Shell) -> None:
    more = '  - {name: other, rule: "mine.py:EveryNth"}\n'
    (shell.folder / "small.yaml").write_text(SMALL + more)
    (shell.folder / "mine.py").write_text(EVERY_NTH.replace("n: int", "n: int = 2"))
    code, _, err = shell("run", "small.yaml")
    assert code == 0 and "1/2 window: ok" in err and " s left\n" in err and "2/2 other" in err
    rows = shell.folder / "results/small/rows.jsonl"
    rows.write_bytes(rows.read_bytes()[:-20])
    code, out, err = shell("run", "small.yaml", "--resume")
    assert code == 0 and "1/2" not in err and "2/2 other: ok" in err and "window" in out
    code, _, err = shell("run", "small.yaml", "seed=1", "--resume")
    assert code == 2 and err.count("\n") == 1 and "seed was 0, is 1" in err


def test_stopped_by_the_user(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexsparse.experiment.run.run_row", stopped)
    code, out, err = shell("run", "small.yaml")
    assert code == 130 and out == "" and "--resume goes on" in err


@pytest.mark.parametrize(("verb", "form"), [("run", FORM), ("bench", EXAMPLE)])
def test_help_shows_the_form_of_a_file(verb: str, form: str, shell: Shell) -> None:
    _, out, _ = shell(verb, "--help")
    shown = [line.strip() for line in out.splitlines()]
    for line in form.splitlines():
        assert line.strip() in shown


def test_schema(shell: Shell) -> None:
    code, out, _ = shell("schema")
    assert code == 0 and "sliding_window" in json.dumps(json.loads(out)["$defs"]["rule"])


FAULTY = """
from dataclasses import dataclass
from flexsparse import MaskRule, Selector


@dataclass(frozen=True, eq=False)
class Mod(MaskRule):
    n: int = 0

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx % self.n == 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Lost(Selector):
    def score(self, q, k, grid):
        return {}[q.shape[1]]
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mod", "Mod(n=0) divides by zero"),
        ("Lost", "Lost(block=64, keep=16, q_block=64) failed at"),
    ],
)
def test_an_error_in_ones_own_code_has_name_and_line(shell: Shell, name: str, words: str) -> None:
    (shell.folder / "faulty.py").write_text(FAULTY)
    line = {"Mod": "faulty.py:11 `return kv_idx % self.n == 0`", "Lost": "faulty.py:17 `return {}"}
    code, out, err = shell("check", f"faulty.py:{name}")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert words in err and line[name] in err
    key = "rule" if name == "Mod" else "select"
    whole = f'{{and: [causal, "faulty.py:{name}"]}}' if name == "Mod" else f"faulty.py:{name}"
    code, out, err = shell("run", "small.yaml", "rows.0.rule=causal", f"rows.0.{key}={whole}")
    assert code == 1 and "window: failed" in err and "Traceback" not in out + err
    (row,) = [json.loads(r) for r in Path("results/small/rows.jsonl").read_text().splitlines()]
    assert words.split("(")[0] in row["error"] and line[name] in row["error"]


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexsparse", "--help"], capture_output=True, text=True, check=True
    )
    assert "run" in done.stdout and "check" in done.stdout
