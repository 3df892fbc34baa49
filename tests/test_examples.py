"""The examples run as they stand, and stay as short as they claim to be."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from flexsparse.resolve import resolve

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_a_selector_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a selector by its file's name too, is proved, fused and counted, and is 15 lines at most."""
    selector = resolve("./new_selector.py:MeanAndSpread", "selector", EXAMPLES)
    assert len(inspect.getsource(selector).splitlines()) <= 15
    resolve("./new_selector.py:main", beside=EXAMPLES)()
    shown = capsys.readouterr().out
    for part in (
        "512 query rows of flex: ok",
        "backend  flex",
        "logical   ",
        "physical  ",
        "of the attention mass",
    ):
        assert part in shown
