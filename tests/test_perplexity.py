"""The perplexity of a model with a row's attention in all its layers."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import SMALL, lines, written
from rich.console import Console

from flexsparse.errors import ConfigError
from flexsparse.experiment.run import run
from flexsparse.experiment.table import print_table

transformers = pytest.importorskip("transformers")

TOKENS, WORDS = 70, ["?", "a", "b", "c", "d", "e"]

CONFIG = f"""
name: read
input: {{model: {{name: tiny, layer: 1, tokens: {TOKENS}, text_file: words.txt}}}}
perplexity: true
check: false
repeats: 1
rows:
  - {{name: dense, rule: causal, tile: 16}}
  - {{name: window, rule: {{sliding_window: {{size: 5}}}}, tile: 16}}
  - {{name: quest, select: {{quest: {{block: 8, keep: 2, q_block: 8}}}}, rule: causal, tile: 16}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights that scale their scores and logits in their own way, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(WORDS), attention_multiplier=0.5, logits_scaling=0.25,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.GraniteForCausalLM(config).save_pretrained(folder / "tiny")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "tiny")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, len(WORDS), (TOKENS + 5,), generator=draw)
    (folder / "words.txt").write_text(" ".join(WORDS[i] for i in ids))
    return folder


def written_out(folder: Path, seen: torch.Tensor) -> float:
    """From transformers' own loss under a mask ``[TOKENS, TOKENS]``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny").eval()
    text = (folder / "words.txt").read_text().split()[:TOKENS]
    ids = torch.tensor([[WORDS.index(word) for word in text]])
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return math.exp(model(ids, attention_mask=mask[None, None], labels=ids).loss)


def test_it_is_that_of_masks_written_out(tiny: Path) -> None:
    rows = run(written(tiny, CONFIG), tiny / "out")
    dense, window, quest = rows
    age = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    own, narrow = written_out(tiny, age >= 0), written_out(tiny, (age >= 0) & (age < 5))
    assert abs(own - narrow) > 0.01 * own
    assert dense["perplexity"]["value"] == pytest.approx(own, rel=1e-4)
    assert window["perplexity"]["value"] == pytest.approx(narrow, rel=1e-4)
    assert quest["perplexity"]["value"] != pytest.approx(own, rel=1e-3)
    for row in rows:
        assert row["status"] == "ok", row["error"]
        assert row["dense"]["perplexity"] == pytest.approx(own, rel=1e-4)
        assert row["perplexity"]["layers"] == 2
    # What a rule sees does not depend on the layer; what a selector sees is counted in each.
    for row in (dense, window):
        for pairs in ("logical_pairs", "physical_pairs"):
            assert row["perplexity"][pairs] == 2 * row["budget"][pairs]
    assert quest["perplexity"]["physical_pairs"] < dense["perplexity"]["physical_pairs"]


def shown(rows: list[dict[str, Any]], out: Path) -> list[str]:
    text = io.StringIO()
    print_table(rows, Console(file=text, width=120))
    return [text.getvalue(), (out / "report.html").read_text()]


def test_quality_and_speed_stand_in_one_table(tiny: Path) -> None:
    rows = run(written(tiny, CONFIG), tiny / "table")
    printed, page = shown(rows, tiny / "table")
    heads = next(line for line in printed.splitlines() if "mass kept" in line).split()
    for words in ("perplexity", "mass", "pairs", "physical", "inflation", "delivered"):
        assert words in heads
    value = f"{rows[1]['perplexity']['value']:,.2f}"
    for text in (printed, page):
        assert value in text and "In all layers of the model" in text


def test_two_runs_are_compared_in_it(tiny: Path) -> None:
    from flexsparse.verbs.compare import print_comparison, read_run

    rows = run(written(tiny, CONFIG), tiny / "one")
    run(written(tiny, CONFIG, "rows.window.rule.sliding_window.size=9"), tiny / "two")
    text = io.StringIO()
    both = [read_run(str(tiny / name)) for name in ("one", "two")]
    print_comparison(*both, Console(file=text, width=120))
    assert "perplexity" in text.getvalue()
    assert f"{rows[1]['perplexity']['value']:,.2f} →" in text.getvalue()


def test_without_it_there_is_no_such_column(tmp_path: Path) -> None:
    rows = run(written(tmp_path, SMALL), tmp_path / "out")
    assert all("perplexity" not in row for row in rows)
    for text in shown(rows, tmp_path / "out"):
        assert "exp of the mean loss" not in text and "In all layers" not in text
        assert "outside" not in text.split("Where the time goes")[0]


def test_a_row_that_fails_in_the_model_is_kept_as_failed(tiny: Path) -> None:
    bad = "  - {name: snap, rule: causal, select: {snap_kv: {prompt: 900}}}\n"
    rows = run(written(tiny, CONFIG + bad), tiny / "bad")
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "failed"]
    assert all("perplexity" in text for text in shown(rows, tiny / "bad"))


def test_a_run_goes_on_with_it(tiny: Path) -> None:
    whole = run(written(tiny, CONFIG), tiny / "resumed")
    journal = tiny / "resumed" / "rows.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:1]))
    again = run(written(tiny, CONFIG), tiny / "resumed", resume=True)
    assert lines(tiny / "resumed") == again
    assert [r["perplexity"] for r in again] == [r["perplexity"] for r in whole]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("input={sample: smollm2}", "perplexity: is one of a whole model: give an input such as"),
        ("baseline=null", "baseline: must be causal beside a perplexity"),
        ("rows.1.q_offset=0", "rows.1.q_offset: has no meaning in a whole model"),
        ("perplexity=1", "perplexity: must be true or false, got 1"),
    ],
)
def test_what_has_no_perplexity(tmp_path: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, CONFIG, change)
    assert words in str(caught.value)
