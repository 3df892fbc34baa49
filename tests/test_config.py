"""YAML to an experiment: what may be written, and what is said of what may not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from experiments import SMALL, refused, written

import flexsparse as fs
from flexsparse.experiment.build import build_rule, build_score, build_selector
from flexsparse.experiment.source import Source, dump, parse
from flexsparse.masks import Causal, SlidingWindow


# ---- YAML, read strictly


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1E6", 1e6), ("-.5", -0.5), ("3.", 3.0), (".inf", math.inf),
        ("12", 12), ("-3", -3), ("0x1f", 31), ("true", True), ("null", None), ("~", None), ("", None),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"),
        ("12:30", "12:30"), ("017", "017"), ("1_000", "1_000"), ("2026-01-01", "2026-01-01"),
        ("<<", "<<"), ("'1e-3'", "1e-3"),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    read = parse(f"a: {text}", "x").data["a"]
    assert read == value and type(read) is type(value)
    assert parse(dump({"a": value}), "x").data["a"] == value


def test_a_repeated_key_is_refused_with_both_places(tmp_path: Path) -> None:
    text = SMALL + "  - {name: x, rule: causal, rule: causal}\nname: again\n"
    assert refused(tmp_path, text) == [
        "c.yaml:2:1: name: written a second time at line 10, column 1",
        "c.yaml:9:15: rows.3.rule: written a second time at line 9, column 29",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows: [", "c.yaml:1:8: "),
        ("a:\n\t- x\n", "c.yaml:2:1: "),
        ("1: x\n", "a key must be a word"),
        ("a: &x [*x]\n", "a.0: an anchor holds itself"),
        ("- 1\n", "c.yaml:1:1: must be a mapping with name, input"),
        ("", "c.yaml:1:1: must be a mapping with name, input"),
        ("a: !!python/name:os.system\n", "c.yaml:1:4: "),
        ("a: 1\n---\nb: 2\n", "c.yaml:2:1: "),
    ],
)
def test_text_that_is_no_configuration(tmp_path: Path, text: str, words: str) -> None:
    assert any(words in line for line in refused(tmp_path, text))


# ---- every mistake at once, each with its place


def test_every_error_is_told_at_its_place(tmp_path: Path) -> None:
    told = refused(
        tmp_path,
        """\
nme: x
dtype: fp32
check: 0
rows:
  - {name: a, rule: causl, tilee: 4}
  - name: a
    rule:
      and:
        - {sliding_window: {size: 0}}
        - {sliding_window: {sze: 1, size: big}}
    tile: 8
    fallback: {local: 0}
  - {name: c, rule: {sliding_window: 4}, select: {quest: {keep: 1.5}}, score: causal}
  - {name: d, q_offset: 1.5, backend: cuda}
""",
    )
    starts = [
        "c.yaml:1:1: name is missing",
        "c.yaml:1:1: nme: unknown key (did you mean 'name'?); known are name, input",
        "c.yaml:2:1: dtype: must be float16, bfloat16, float32 or float64, got 'fp32'",
        "c.yaml:3:1: check: must be true, false, or how many query rows",
        "c.yaml:5:15: rows.0.rule: no rule is named 'causl' (did you mean 'causal'?)",
        "c.yaml:5:28: rows.0.tilee: unknown key (did you mean 'tile'?); known are name, rule",
        "c.yaml:6:5: rows.1.name: two rows are named 'a'",
        "c.yaml:9:29: rows.1.rule.and.0.sliding_window.size: SlidingWindow size must be at least 1",
        "c.yaml:10:29: rows.1.rule.and.1.sliding_window.sze: sliding_window has no argument 'sze'",
        "c.yaml:10:37: rows.1.rule.and.1.sliding_window.size: must be an integer, got 'big'",
        "c.yaml:11:5: rows.1.tile: tile must be at least 16, got 8",
        "c.yaml:12:5: rows.1.fallback: must be self or {local: n}",
        "c.yaml:13:22: rows.2.rule.sliding_window: arguments must be a mapping",
        "c.yaml:13:59: rows.2.select.quest.keep: must be an integer, got 1.5",
        "c.yaml:13:72: rows.2.score: causal is a rule, not a score",
        "c.yaml:14:15: rows.3.q_offset: must be an integer, got 1.5",
        "c.yaml:14:30: rows.3.backend: must be auto, flex or tiles, got 'cuda'",
    ]
    assert len(told) == len(starts)
    for line, start in zip(told, starts, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("input: {}", "input: needs exactly one of sample, file, random, model, got none"),
        ("input: {sample: smollm2, file: x}", "got sample and file"),
        ("input: {random: {heads: 3, kv_heads: 2, q_len: 4}}", "multiple of kv_heads, got 3 and 2"),
        (
            "baseline: {sliding_window: {size: 0}}",
            "baseline.sliding_window.size: SlidingWindow size",
        ),
        ("seed: true", "seed: must be an integer, got true"),
        ("rows: []", "rows: must be a list of at least 1, got []"),
        ("name: ../up", "name: "),
    ],
)
def test_other_values(tmp_path: Path, given: str, words: str) -> None:
    data = {**yaml.safe_load(SMALL), **yaml.safe_load(given)}
    assert any(words in line for line in refused(tmp_path, dump(data)))


# ---- overrides


def test_overrides_reach_any_value(tmp_path: Path) -> None:
    made = written(
        tmp_path,
        SMALL
        + '  - {name: mine, rule: {"flexsparse.masks.sliding_window:SlidingWindow": {size: 3}}}\n',
        "dtype=bfloat16",
        "rows.1.rule.sliding_window.size=64",
        "rows.0.tile=[64, 32]",
        "rows.3.rule.flexsparse.masks.sliding_window:SlidingWindow.size=5",
        "seed=7",
        "check=false",
    )
    assert made.config.dtype == "bfloat16" and made.config.seed == 7 and made.config.check is False
    assert made.config.rows[0].tile == [64, 32]
    assert [case.rule.size for case in (made.cases[1], made.cases[3])] == [64, 5]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "rows.1.rule.sliding_window.size=0",
            "rows.1.rule.sliding_window.size: SlidingWindow size",
        ),
        ("dtype=fp8", "dtype: must be float16"),
        ("dtyp=float16", "dtyp: unknown key (did you mean 'dtype'?)"),
        ("rows.9.tile=16", "rows has the entries 0 to 2 (dense, window, quest), not '9'"),
        ("rows.0.rule.size=3", "rows.0.rule is 'causal', which has no 'size' to set"),
        ("tile", "an override is key=value"),
        ("seed=[", "expected"),
    ],
)
def test_an_override_is_blamed_by_name(tmp_path: Path, argument: str, words: str) -> None:
    (line,) = refused(tmp_path, SMALL, argument)
    assert line.startswith(f"argument {argument!r}") and words in line


def test_the_printed_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    made = written(
        tmp_path, SMALL, "baseline=null", "rows.0.name='1e-3'", "rows.0.fallback={local: 3}"
    )
    again = written(tmp_path, made.as_yaml())
    assert again.plain == made.plain and again.sha256 == made.sha256
    assert written(tmp_path, SMALL).sha256 != made.sha256


# ---- specifications to objects


def build(builder: Any, spec: object) -> Any:
    source = Source("", None)
    made = builder(spec, (), source)
    assert not source.problems
    return made


def test_the_algebra_of_rules() -> None:
    window = {"sliding_window": {"size": 3}}
    rule = build(
        build_rule,
        {"and": ["causal", {"or": [window, {"not": "causal"}, {"attention_sink": {"size": 1}}]}]},
    )
    assert fs.picture(rule, 6) == fs.picture(
        Causal() & (SlidingWindow(3) | (lambda b, h, q, kv: kv < 1)), 6
    )


def test_a_list_becomes_a_tensor_where_one_is_wanted() -> None:
    rule = build(build_rule, {"document": {"document_of": [0, 0, 1]}})
    assert torch.equal(rule.document_of, torch.tensor([0, 0, 1]))
    score = build(build_score, [{"alibi": {"slopes": [0.5, 0.25]}}, {"softcap": {"cap": 3}}])
    assert str(score) == "Alibi(slopes=float32[2]) >> Softcap(cap=3.0)"
    assert build(build_rule, {"prefix_lm": {"prefix": 2}}).prefix == 2


def test_a_maker_is_called_and_a_mod_is_taken_as_it_is(tmp_path: Path) -> None:
    made = build(build_score, {"flexsparse.masks.alibi:Alibi.of_heads": {"heads": 4}})
    assert made.slopes.shape == (4,)
    file = tmp_path / "mods.py"
    file.write_text("def diagonal(b, h, q, kv):\n    return q == kv\n")
    assert fs.picture(build(build_rule, f"{file}:diagonal"), 2) == "#.\n.#"


def test_a_selector_that_is_none() -> None:
    source = Source("", None)
    spec = {"flexsparse.masks.alibi:Alibi.of_heads": {"heads": 4}}
    assert build_selector(spec, (), source) is None
    assert [said for _, said in source.problems] == ["must be a Selector, got Alibi"]


