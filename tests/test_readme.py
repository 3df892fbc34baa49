"""Every Python snippet of the README runs, in order, in one namespace."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_snippets_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text()
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    scope = vars(module)
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, re.S)):
        # Dataclasses and refusals read source lines, so each snippet is a file.
        path = tmp_path / f"snippet{i}.py"
        path.write_text(snippet)
        exec(compile(snippet, str(path), "exec"), scope)
    shown = capsys.readouterr().out
    picture = re.search(r"```text\n(#\.+\n.*?)```", text, re.S)
    assert picture and picture[1] in shown
    assert "write & for and" in shown


def test_the_ci_script_runs_the_test_command() -> None:
    command = re.search(r"# pass the tests\n(.*?)\n", README.read_text())
    assert command
    assert command[1] in (README.parent / ".ci" / "run").read_text()


def test_the_example_is_the_form_and_runs(tmp_path: Path) -> None:
    from flexsparse.experiment.form import FORM
    from flexsparse.experiment.load import load
    from flexsparse.experiment.run import run

    example = README.parent / "examples" / "mine.yaml"
    assert example.read_text().strip() == FORM.strip()
    records = run(load(example), tmp_path / "out")
    assert [record["status"] for record in records] == ["ok"] * 3
