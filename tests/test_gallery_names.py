"""The gallery by its names in a configuration: with arguments, from files, inside one another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import flexsparse.masks
from flexsparse.cli import main
from flexsparse.resolve import gallery, resolve

MINE = """
from dataclasses import dataclass
from flexsparse import MaskRule

@dataclass(frozen=True, eq=False)
class Banded(MaskRule):
    width: int = 4
    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < self.width
"""

ROWS = """
name: gallery
input: {random: {heads: 4, q_len: 64, head_dim: 16}}
repeats: 1
rows:
  - {name: own file, rule: {and: [causal, {"./mine.py:Banded": {width: 9}}]}, tile: 32}
  - {name: image, rule: {neighborhood: {canvas: [8, 8], kernel: [3, 3], dilation: [2, 1]}}, tile: 32}
  - name: windows
    rule: {shifted_window: {canvas: [8, 8], window: [4, 4], shift: [2, 2]}}
    score: {swin_bias: {bias: [[[0.0, 1.0, 2.0]], [[1.0, 0.0, 1.0]], [[3.0, 0.0, 3.0]], [[0.0, 0.0, 0.0]]], canvas: [8, 8]}}
    tile: 32
  - {name: heads, rule: {dilated: {size: [1, 2, 3, 4], dilation: 2}}, tile: 32}
  - name: maker
    rule: {"flexsparse.masks.bigbird:BigBird.drawn": {kv_len: 64, block: 8, heads: 4}}
    score: [{temperature: {temperature: [0.5, 1.0, 2.0, 4.0]}}, {softcap: {cap: 5.0}}]
    tile: 32
  - {name: import path, rule: {"flexsparse.masks:FixedColumn": {block: 8, cells: 2}}, tile: 32}
  - name: tree
    rule: {"flexsparse.masks:Tree.of_parents": {parents: [-1, 0, 0, 1], start: 60}}
    score: {t5_bias: {bias: [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 2.0]], bidirectional: false}}
    tile: 32
"""

NESTED = """
name: nested
input: {random: {heads: 4, q_len: 40, head_dim: 16}}
repeats: 1
rows:
  - name: mixture
    rule:
      and:
        - causal
        - per_head:
            rules:
              - {"./mine.py:Banded": {width: 9}}
              - {or: [{not: {sliding_window: {size: 2}}}, {per_head: {rules: [causal]}}]}
            rule_of: [0, 1, 1, 0]
    tile: 32
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["flexsparse", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("text", "rows"),
    [pytest.param(ROWS, 7, id="flat"), pytest.param(NESTED, 1, id="nested")],
)
def test_rows_of_a_configuration_run_and_agree_with_the_reference(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    rows: int,
) -> None:
    (folder / "run.yaml").write_text(text)
    code, out, err = command(monkeypatch, capsys, "run", "run.yaml")
    assert code == 0, out + err
    assert err.count(": ok") == rows


def test_a_mixture_of_heads_is_drawn_from_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Head 0 is under the first rule: a band of two, 129 pairs of 65 queries."""
    rules = "rules=[{sliding_window: {size: 2}}, causal]"
    code, out, _ = command(monkeypatch, capsys, "check", "per_head", rules)
    assert code == 0 and "head 0" in out and "; 129 pairs seen" in out


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("[causl]", "no rule is named 'causl' (did you mean 'causal'?)"),
        ("[causal, {sliding_window: {}}]", "sliding_window needs size"),
        ("[softcap]", "softcap is a score, not a rule"),
        ("causal", "must be a list"),
    ],
)
def test_a_mistake_inside_a_mixture_is_one_sentence(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rules: str,
    words: str,
) -> None:
    code, out, err = command(monkeypatch, capsys, "check", "per_head", f"rules={rules}")
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_every_rule_is_listed_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(monkeypatch, capsys, "list")
    named = [*gallery("rule"), *gallery("score")]
    assert code == 0 and len(named) >= 28
    assert all(f"  {name} " in out for name in named)


def test_a_name_is_the_class_that_its_file_is_named_after() -> None:
    for name in [*gallery("rule"), *gallery("score")]:
        found = resolve(name)
        assert found.__name__.lower() == name.replace("_", "")
        assert getattr(flexsparse.masks, found.__name__) is found
