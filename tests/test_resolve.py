"""Names to objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexsparse.errors import ConfigError
from flexsparse.masks import Alibi, Causal, PrefixLM, SlidingWindow, Softcap
from flexsparse.resolve import did_you_mean, gallery, kind_of, resolve
from flexsparse.rules import MaskRule
from flexsparse.selectors import OracleTopK, Quest, Random

MINE = """
from dataclasses import dataclass
from flexsparse import MaskRule

@dataclass(frozen=True, eq=False)
class Banded(MaskRule):
    width: int = 4
    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < self.width

def diagonal(b, h, q_idx, kv_idx):
    return q_idx == kv_idx

ready = Banded(2)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("sliding_window", "rule", SlidingWindow),
        ("prefix_lm", "rule", PrefixLM),
        ("softcap", "score", Softcap),
        ("quest", "selector", Quest),
        ("oracle", "selector", OracleTopK),
        ("random", None, Random),
        ("flexsparse.masks:Causal", "rule", Causal),
        ("flexsparse.masks.alibi:Alibi.of_heads", "score", Alibi.of_heads),
    ],
)
def test_names(name: str, kind: object, found: object) -> None:
    assert resolve(name, kind) is found


def test_every_file_of_the_gallery_has_a_name() -> None:
    import flexsparse.masks

    folder = Path(flexsparse.masks.__file__).parent
    files = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert gallery("rule").keys() | gallery("score").keys() == files
    assert not gallery("rule").keys() & gallery("score").keys()


def test_objects_of_a_file(mine: Path) -> None:
    banded = resolve("./mine.py:Banded", "rule")
    assert issubclass(banded, MaskRule)
    assert resolve("mine.py:Banded", "rule") is banded
    assert resolve(f"{mine}/mine.py:Banded", "rule") is banded
    assert kind_of(resolve("./mine.py:diagonal", "rule")) == "rule"
    assert resolve("./mine.py:ready", "rule").width == 2


def test_import_path(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine)
    assert resolve("mine:Banded", "rule").__name__ == "Banded"
    sys.modules.pop("mine")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "slidng_window",
            "rule",
            ["'slidng_window'", "did you mean 'sliding_window'", "flexsparse list"],
        ),
        ("qqq", "rule", ["no rule is named 'qqq'; there are", "causal", "prefix_lm"]),
        ("softcap", "rule", ["softcap is a score, not a rule"]),
        ("causal", "selector", ["causal is a rule, not a selector"]),
        ("flexsparse.masks:Softcap", "rule", ["not a rule", "it is a score"]),
        ("math:pi", "rule", ["not a rule: it is of type float"]),
        ("collections:OrderedDict", "rule", ["not a rule", "class OrderedDict"]),
        ("flexsparse.masks.Causal", "rule", ["has a colon", "flexsparse.masks:Causal"]),
        ("flexsparse.masks:Causl", "rule", ["has no Causl", "did you mean 'Causal'"]),
        ("nowhere_at_all:X", "rule", ["cannot import nowhere_at_all"]),
        ("./absent.py:X", "rule", ["there is no file ./absent.py"]),
        ("./mine.py", "rule", ["./mine.py:NAME", "Banded", "diagonal"]),
        ("./mine.py:Bandd", "rule", ["has no Bandd", "did you mean 'Banded'"]),
        (
            "./broken.py:X",
            "rule",
            ["cannot run ./broken.py", "ZeroDivisionError", "at broken.py:2 `1 / 0`"],
        ),
        ("./needy.py:X", "rule", ["cannot run ./needy.py", "not_installed_here"]),
        ("needy:X", "rule", ["cannot import needy", "it needs not_installed_here"]),
    ],
)
def test_errors_say_what_was_written_and_what_exists(
    mine: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: object, words: list[str]
) -> None:
    monkeypatch.syspath_prepend(mine)
    (mine / "broken.py").write_text("import math\n1 / 0\n")
    (mine / "needy.py").write_text("import not_installed_here\n")
    with pytest.raises(ConfigError) as caught:
        resolve(name, kind)
    for word in words:
        assert word in str(caught.value)


def test_did_you_mean_is_silent_when_nothing_is_near() -> None:
    assert did_you_mean("zebra", ["causal", "window"]) == ""


def test_importing_the_library_stays_light() -> None:
    heavy = "pydantic typer rich jinja2 yaml flexsparse.masks flexsparse.experiment"
    code = (
        "import sys, torch; before = set(sys.modules); import flexsparse, flexsparse.resolve; "
        f"print([m for m in {heavy.split()} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
