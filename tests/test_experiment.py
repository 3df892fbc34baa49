"""From YAML to rows and a report."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import EVERY_NTH, SMALL, lines, written
from rich.console import Console
from safetensors.torch import save_file

import flexsparse as fs
from flexsparse.checking import Report
from flexsparse.errors import ConfigError
from flexsparse.experiment import row as row_module
from flexsparse.experiment.columns import TABLES
from flexsparse.experiment.config import Input, RandomInput
from flexsparse.experiment.inputs import load_inputs
from flexsparse.experiment.load import load
from flexsparse.experiment.quality import quality
from flexsparse.experiment.run import run
from flexsparse.experiment.table import cells, print_table
from flexsparse.experiment.verdict import verdict
from flexsparse.masks import Causal, SlidingWindow

ROOT = Path(__file__).parent.parent


# ---- inputs


def test_the_sample_is_a_layer_of_a_model() -> None:
    q, k, v = load_inputs(Input(sample="smollm2"), torch.float32, torch.device("cpu"), 0)
    assert q.shape == (1, 9, 1024, 64) and k.shape == v.shape == (1, 3, 1024, 64)
    assert q.dtype == torch.float32


def test_files(tmp_path: Path) -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    save_file({"q": q, "k": k, "v": k.clone()}, tmp_path / "good.safetensors")
    save_file({"q": q, "key": k}, tmp_path / "short.safetensors")
    save_file({"q": q, "k": k, "v": k.int()}, tmp_path / "whole.safetensors")
    save_file({"q": q / 0, "k": k, "v": k.clone()}, tmp_path / "infinite.safetensors")
    (tmp_path / "text.safetensors").write_text("no")

    def read(name: str) -> tuple[torch.Tensor, ...]:
        return load_inputs(Input(file=str(tmp_path / name)), torch.float64, torch.device("cpu"), 0)

    assert torch.equal(read("good.safetensors")[0], q.double())
    for name, words in {
        "short.safetensors": "k, v is missing from key, q",
        "whole.safetensors": "v of .* must be floating point numbers, got int32",
        "infinite.safetensors": "q holds 80 values of 80 that are not finite in float64",
        "text.safetensors": "is not a safetensors file",
        "absent.safetensors": "there is no file",
    }.items():
        with pytest.raises(ConfigError, match=words):
            read(name)


def test_random_inputs_follow_the_seed() -> None:
    given = Input.model_validate({"random": {"heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 9}})
    device = torch.device("cpu")
    q, k, v = load_inputs(given, torch.float16, device, 3)
    assert q.shape == (1, 4, 5, 64) and k.shape == v.shape == (1, 2, 9, 64)
    assert torch.equal(q, load_inputs(given, torch.float16, device, 3)[0])
    assert not torch.equal(q, load_inputs(given, torch.float16, device, 4)[0])


def test_no_more_is_drawn_than_the_machine_holds() -> None:
    shape = RandomInput(heads=1, q_len=2**30, head_dim=80)
    with pytest.raises(ConfigError, match=r"take 960 GiB, more than the"):
        load_inputs(Input(random=shape), torch.float32, torch.device("cpu"), 0)
    with pytest.raises(ValueError, match="would take 3 TiB"):
        RandomInput(heads=1024, q_len=2**20, head_dim=256)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with random weights, scores scaled in its own way, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GraniteConfig, GraniteModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    model = GraniteModel(
        GraniteConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=8, attention_multiplier=0.5,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["?", "a", "b", "c", "d"])}, "?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def test_a_models_layer_is_what_enters_its_attention(tiny: Path) -> None:
    from transformers import AutoModel

    (tiny.parent / "words.txt").write_text("a b c a d a b c d d")
    given = {"name": "tiny", "layer": 1, "tokens": 9, "text_file": "words.txt"}
    model_input = Input.model_validate({"model": given})
    q, k, v = load_inputs(model_input, torch.float32, torch.device("cpu"), 0, tiny.parent)
    assert q.shape == (1, 4, 9, 8) and k.shape == v.shape == (1, 2, 9, 8)
    # The model's own attention weights are those of the captured q and k.
    model = AutoModel.from_pretrained(tiny, attn_implementation="eager")
    ids = torch.tensor([[1, 2, 3, 1, 4, 1, 2, 3, 4]])
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[1]
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    mine = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    assert torch.allclose(mine, weights, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "tiny", "layer": 2}, "layer must be 0 to 1 in tiny, got 2"),
        ({"name": "tiny", "layer": 0, "text": "a b", "tokens": 3}, "tokens must be at most 2"),
        ({"name": "./absent", "layer": 0}, "cannot load ./absent: "),
        ({"name": "tiny", "layer": 0, "text_file": "none.txt"}, "there is no file none.txt"),
    ],
)
def test_a_model_that_cannot_be_captured(tiny: Path, given: dict[str, Any], words: str) -> None:
    model_input = Input.model_validate({"model": given})
    with pytest.raises(ConfigError) as caught:
        load_inputs(model_input, torch.float32, torch.device("cpu"), 0, tiny.parent)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_transformers_the_error_names_the_extra(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model_input = Input.model_validate({"model": {"name": str(tiny), "layer": 0}})
    with pytest.raises(ConfigError, match=r"pip install 'flexsparse\[hf\]'"):
        load_inputs(model_input, torch.float32, torch.device("cpu"), 0)


# ---- what a row keeps of dense attention


def test_mass_and_error_against_a_direct_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 33, 8, generator=draw) for h in (4, 2, 2))
    rule = SlidingWindow(5)
    # Small enough that the rows come in several parts.
    monkeypatch.setattr("flexsparse.experiment.quality._PAIRS", 2 * 4 * 33 * 7)
    out = fs.attention(q, k, v, rule=rule)
    found = quality(
        (q, k, v), out, fs.Grid(33, 33, batch=2), Causal(), rule=rule, select=None, fallback=None
    )
    age = torch.arange(33)[:, None] - torch.arange(33)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8**0.5
    weights = scores.masked_fill(age < 0, -torch.inf).softmax(-1)
    dense = weights @ v.double().repeat_interleave(2, 1)
    assert found["mass_kept"] == pytest.approx(
        (weights * (age < 5)).sum(-1).mean().item(), rel=1e-5
    )
    wanted = ((out - dense).norm() / dense.norm()).item()
    assert found["output_error"] == pytest.approx(wanted, rel=1e-5)


def test_queries_that_see_nothing_do_not_count() -> None:
    q = torch.randn(1, 1, 8, 8)
    none = fs.MaskRule.of(lambda b, h, q, kv: kv < 0)
    grid = fs.Grid(8, 8)
    found = quality((q, q, q), q, grid, none, rule=None, select=None, fallback=None)
    assert found["mass_kept"] is None and found["output_error"] is None
    assert found["pairs_outside"] == 64 and found["pairs_dropped"] is None


# ---- runs


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    run(written(folder, SMALL), folder / "out")
    return folder / "out"


def test_a_run_leaves_its_four_files(small: Path) -> None:
    assert {p.name for p in small.iterdir()} == {
        "config.yaml",
        "environment.json",
        "rows.jsonl",
        "report.html",
    }
    around = json.loads((small / "environment.json").read_text())
    assert around["torch"] == torch.__version__ and around["flexsparse"] == fs.__version__
    assert load(small / "config.yaml").config.name == "small"


def test_each_row_says_what_it_kept_cost_and_delivered(small: Path) -> None:
    dense, window, quest = lines(small)
    assert [row["status"] for row in (dense, window, quest)] == ["ok"] * 3
    assert dense["mass_kept"] == pytest.approx(1, abs=1e-5) and dense["output_error"] < 1e-5
    assert 0 < window["mass_kept"] < 1 and window["output_error"] > 0.1
    pairs = 4 * sum(min(i + 1, 8) for i in range(80))
    assert window["budget"]["logical_pairs"] == pairs
    assert window["dense"]["pairs"] == dense["budget"]["logical_pairs"] == 4 * 80 * 81 // 2
    assert quest["tile"] == [16, 32] and quest["select"].startswith("Quest(block=16, keep=2")
    assert window["time_ms"]["index"] == 0 and quest["time_ms"]["index"] > 0
    for row in (dense, window, quest):
        assert row["check"]["rows"] == 80 and all(
            p["ok"] for p in row["check"]["quantities"].values()
        )
        assert row["delivered"] == pytest.approx(row["got"] / row["promised"])
        assert math.prod(row["factors"].values()) == pytest.approx(row["delivered"])
        assert row["got"] == pytest.approx(row["dense"]["ms"] / row["time_ms"]["total"])
        assert row["plan"].startswith("Plan for Grid(80, 80")
        assert row["compiles"] == 0 and row["first_ms"] > 0 and row["seed"] == 0


def test_the_report_needs_nothing_else(small: Path) -> None:
    page = (small / "report.html").read_text()
    assert "Did the hardware skip what the algorithm promised?" in page
    for row in lines(small):
        assert row["name"] in page
    for needle in ("http", "<script", "src=", "@import", "url("):
        assert needle not in page


def test_names_and_errors_are_escaped_in_the_report(tmp_path: Path) -> None:
    made = written(tmp_path, SMALL, "rows.0.name='<b>&'", "check=false")
    run(made, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page


def test_a_failed_row_is_kept_and_the_others_go_on(tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.py"
    faulty.write_text(
        "from dataclasses import dataclass\nfrom flexsparse import Selector\n"
        "@dataclass(frozen=True, eq=False, kw_only=True)\nclass Faulty(Selector):\n"
        "    def score(self, q, k, grid):\n        raise RuntimeError('no luck')\n"
    )
    text = SMALL.replace("{name: dense, rule: causal}", f'{{name: bad, select: "{faulty}:Faulty"}}')
    rows = run(
        written(tmp_path, text, "rows.1.score={alibi: {slopes: [1.0]}}", "rows.1.rule=null"),
        tmp_path / "out",
    )
    assert [row["status"] for row in rows] == ["failed", "failed", "ok"]
    assert rows[0]["error"] == (
        "Faulty(block=64, keep=16, q_block=64) failed at faulty.py:6 `raise RuntimeError('no luck')`: "
        "RuntimeError: no luck"
    )
    assert "faulty.py" in rows[0]["traceback"]
    assert "Failed: bad, window." in verdict(rows)
    assert lines(tmp_path / "out") == rows
    assert "no luck" in (tmp_path / "out" / "report.html").read_text()
    for _, columns in TABLES:
        assert len(cells(rows[0], columns)) == len(columns)


def test_code_that_exits_fails_its_row_alone(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(
        "import sys\nfrom flexsparse import Selector\n"
        "class Leaves(Selector):\n    def score(self, q, k, grid):\n        sys.exit('bye')\n"
    )
    made = written(tmp_path, SMALL, "rows.quest.select=leaves.py:Leaves", "check=false")
    rows = run(made, tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "ok", "failed"]
    assert rows[2]["error"].endswith("leaves.py:5 `sys.exit('bye')`: SystemExit: bye")


def test_a_wrong_row_says_which_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*args: Any, **options: Any) -> Report:
        report = fs.check(*args, **options)
        return Report(report.plan, report.differences, "kernel", "out is off", report.rows)

    monkeypatch.setattr(row_module, "check", off)
    (row,) = run(written(tmp_path, SMALL.split("  - {name: window")[0]), tmp_path / "out")
    assert row["status"] == "wrong" and row["error"] == "first difference: kernel; out is off"


def test_heads_are_laid_as_the_row_says(tmp_path: Path) -> None:
    made = written(tmp_path, SMALL, "rows.0.pack=pack", "check=8")
    first, *_ = run(made, tmp_path / "out")
    assert first["status"] == "ok" and "query heads beside each query" in first["plan"]


def test_rows_are_cut_and_laid_as_the_row_says(tmp_path: Path) -> None:
    made = written(
        tmp_path, SMALL, "rows.0.split=1", "rows.0.tile=16", "rows.2.cluster=true", "rows.2.tile=32"
    )
    first, _, quest = run(made, tmp_path / "out")
    assert [row["status"] for row in (first, quest)] == ["ok"] * 2
    assert "of more than 1 tiles are cut as asked" in first["plan"]
    assert "rows that select alike stand in a tile" in quest["plan"]


def test_a_second_run_puts_the_rows_of_the_first_aside(tmp_path: Path) -> None:
    for size in (8, 4):
        made = written(tmp_path, SMALL, f"rows.1.rule.sliding_window.size={size}", "check=16")
        run(made, tmp_path / "out")
    assert lines(tmp_path / "out")[1]["rule"] == "SlidingWindow(size=4)"
    assert len(lines(tmp_path / "out")) == 3
    assert lines(tmp_path / "out")[1]["check"]["rows"] == 16
    (earlier,) = (tmp_path / "out").glob("rows-*.jsonl")
    assert "SlidingWindow(size=8)" in earlier.read_text()


def test_other_baselines_and_offsets(tmp_path: Path) -> None:
    made = written(
        tmp_path, SMALL, "baseline={sliding_window: {size: 40}}", "input.random.q_len=16",
        "input.random.kv_len=80", "rows.0.q_offset=0", "rows.2.fallback=self",
    )  # fmt: skip
    rows = run(made, tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert rows[0]["dense"] != rows[1]["dense"] and rows[1]["dense"]["by"] == "flexsparse decode"
    full = written(tmp_path, SMALL, "baseline=null", "check=false")
    rows = run(full, tmp_path / "out")
    assert rows[0]["dense"]["pairs"] == 4 * 80 * 80 and rows[0]["mass_kept"] < 1
    assert "check" not in rows[0]


def test_what_a_reader_must_know_is_said_beside_the_figures(tmp_path: Path) -> None:
    made = written(
        tmp_path, SMALL, "rows.0.rule=null", "rows.quest.select.quest.keep=99",
        "rows.window.score={softcap: {cap: 3.0}}",
    )  # fmt: skip
    full, window, quest = run(made, tmp_path / "out")
    (note,) = full["notes"]
    assert full["pairs_outside"] == 4 * 80 * 79 // 2
    assert note.startswith(
        "sees 12,640 pairs (49.4% of its own) that the baseline Causal() does not"
    )
    assert "baseline: null" in note
    assert "has a score, which the baseline has not" in window["notes"][0]
    assert quest["pairs_dropped"] == 0 and "keeps every block" in quest["notes"][0]
    page = (tmp_path / "out" / "report.html").read_text()
    shown = io.StringIO()
    print_table([full, window, quest], Console(file=shown, width=100))
    for text in (page, shown.getvalue()):
        assert "dense\u00a0*" in text and "quest\u00a0*" in text
        assert "baseline: Causal()" in text and "Baseline (dense attention): Causal(), by" in text
        for words in ("12,640 pairs", "every block", "the baseline has not"):
            assert words in " ".join(text.split())
    assert [run(written(tmp_path, SMALL), tmp_path / "o")[i]["notes"] for i in range(3)] == [[]] * 3


def test_a_baseline_that_cannot_run_fails_every_row(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVERY_NTH)
    made = written(tmp_path, SMALL, 'baseline={"mine.py:EveryNth": {n: 0}}')
    rows = run(made, tmp_path / "out")
    assert [row["status"] for row in rows] == ["failed"] * 3
    for row in rows:
        assert row["error"].startswith("the baseline cannot run: ") and "mine.py:10" in row["error"]
    assert "No baseline was timed." in (tmp_path / "out" / "report.html").read_text()


def test_bad_inputs_are_blamed_before_anything_is_written(tmp_path: Path) -> None:
    made = written(tmp_path, SMALL, "input={file: absent.safetensors}")
    with pytest.raises(ConfigError, match=r"argument .*: input: there is no file absent"):
        run(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_quickstart_is_valid() -> None:
    made = load(ROOT / "configs" / "quickstart.yaml")
    assert [case.row.name for case in made.cases] == [
        "dense", "window", "window + sinks", "quest", "oracle top-k", "random",
    ]  # fmt: skip


# ---- the answer in words


def record(name: str, promised: float, got: float, backend: str = "flex") -> dict[str, Any]:
    return {
        "name": name, "status": "ok", "promised": promised, "got": got, "backend": backend,
        "delivered": got / promised, "mass_kept": 0.5, "pairs_outside": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([record("a", 4, 3.9), record("b", 2, 1.9)], "Yes, it skipped what was promised: 'a' came"),
        ([record("a", 4, 2), record("b", 2, 0.5)], "In part: 'a' came closest, keeping 50%"),
        (
            [record("a", 1.1, 0.9), record("b", 4, 2)],
            "In part: 'b' came closest of those that beat",
        ),
        ([record("a", 4, 0.5)], "No: 'a' came closest"),
        ([record("dense", 1, 0.9)], "There is no answer"),
    ],
)
def test_verdict(rows: list[dict[str, Any]], start: str) -> None:
    assert verdict(rows).startswith(start)
    assert "plain torch" not in verdict(rows)
    assert "plain torch" in verdict([*rows, record("c", 1, 1, "tiles")])


def test_a_row_that_keeps_less_at_no_less_cost_is_not_praised() -> None:
    quest, random = record("quest", 4, 2), record("random", 3.8, 2)
    quest["mass_kept"], random["mass_kept"] = 0.9, 0.3
    for rows in ([quest, random], [random, quest]):
        said = verdict(rows)
        assert said.startswith("In part: 'quest' came closest, keeping 90% of the attention mass.")
        assert "'random' delivered 53% of its promise, keeping 30%." in said
    # Nor one that is a little faster for much less attention; one that is much faster is.
    assert "'quest' came closest" in verdict([quest, random | {"got": 2.1, "delivered": 0.55}])
    assert "'random' came closest, keeping 30%" in verdict([
        quest | {"got": 0.5, "delivered": 0.125}, random | {"got": 1.9, "delivered": 0.5}
    ])  # fmt: skip
    # The same for less time, whatever was promised.
    small = record("small", 1.1, 2) | {"mass_kept": 0.8}
    assert "'quest' came closest" in verdict([small, quest])
    assert "'small' came closest" in verdict([small, quest | {"got": 1.9, "delivered": 0.475}])


def test_rows_whose_attention_is_not_known_answer_too() -> None:
    rows = [record("a", 4, 2) | {"mass_kept": None}, record("b", 4, 3) | {"mass_kept": None}]
    assert verdict(rows).startswith("In part: 'b' came closest. It promised")


def test_only_right_rows_within_the_baseline_answer() -> None:
    other = record("other", 4, 4) | {"pairs_outside": 3}
    wrong = record("wrong", 4, 4) | {"status": "wrong"}
    said = verdict([other, wrong, record("a", 4, 0.5)])
    assert said.startswith("No: 'a' came closest") and "Wrong: wrong." in said
    assert "Left out, as they see pairs outside the baseline: other." in said
    assert verdict([other, wrong]).startswith("There is no answer")
