"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexsparse.cli import main

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
    assert code == 0 and "1/1 window: ok" in err
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
        (["check", "sliding_window", "size=a"], "size: must be a valid integer, got 'a'"),
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


def test_list(shell: Shell) -> None:
    code, out, _ = shell("list")
    assert code == 0
    for word in ("sliding_window", "alibi", "oracle", "tiles", "flex"):
        assert word in out
    assert "no gradients: FlexAttention has no backward on CPU" in out


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexsparse", "--help"], capture_output=True, text=True, check=True
    )
    assert "run" in done.stdout and "check" in done.stdout
