"""YAML to an experiment: what may be written, and what is said of what may not."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from experiments import EVERY_NTH, SMALL, refused, written

import flexsparse as fs
from flexsparse.errors import ConfigError
from flexsparse.experiment.build import build_rule, build_score, build_selector, parameters
from flexsparse.experiment.config import Config, Row
from flexsparse.experiment.form import FORM
from flexsparse.experiment.load import load
from flexsparse.experiment.run import run
from flexsparse.experiment.schema import schema
from flexsparse.experiment.source import Source, dump, parse
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.resolve import Kind, gallery

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
  - {name: e, split: true, cluster: 2}
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
        "c.yaml:13:22: rows.2.rule.sliding_window: arguments have names: write {sliding_window: {size: 4}}",
        "c.yaml:13:59: rows.2.select.quest.keep: Quest keep must be an int of at least 1, a fraction",
        "c.yaml:13:72: rows.2.score: causal is a rule, not a score",
        "c.yaml:14:15: rows.3.q_offset: must be an integer, got 1.5",
        "c.yaml:14:30: rows.3.backend: must be auto, measured, decode, flash, flex, tiles, gather or dense, got 'cuda'",
        "c.yaml:15:15: rows.4.split: must be how many tiles a row may have, at least 1, or false, got true",
        "c.yaml:15:28: rows.4.cluster: ",
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
        (
            "rows.1.rule.strided.stride=4",
            "rows.1.rule.strided: stands beside sliding_window, but a",
        ),
        ("rows.2.select.keep=4", "arguments below: {quest: {argument: value}}"),
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


# ---- the form that help and README show


def test_the_form_of_help_and_readme_is_valid(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVERY_NTH)
    made = written(tmp_path, FORM)
    assert [case.row.name for case in made.cases] == ["window", "own + sinks", "quest"]
    assert FORM in (Path(__file__).parent.parent / "README.md").read_text()
    assert 10 <= len(FORM.splitlines()) <= 22


def test_a_file_is_looked_for_beside_the_configuration_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder, n in ((beside, 2), (here, 3)):
        folder.mkdir()
        (folder / "mine.py").write_text(EVERY_NTH.replace("n: int", f"n: int = {n}"))
    (here / "other.py").write_text(EVERY_NTH.replace("n: int", "n: int = 5"))
    monkeypatch.chdir(here)
    text = SMALL + (
        '  - {name: a, rule: "./mine.py:EveryNth"}\n  - {name: b, rule: "other.py:EveryNth"}\n'
    )
    made = written(beside, text)
    assert [case.rule.n for case in made.cases[3:]] == [2, 5]
    (told,) = refused(beside, text.replace("other.py", "absent.py"))
    assert f"there is no file absent.py in {beside} or {here}" in told
    # What is printed runs from any folder.
    (here / "printed.yaml").write_text(made.as_yaml())
    assert [case.rule.n for case in load(here / "printed.yaml").cases[3:]] == [2, 5]


def test_the_printed_configuration_leaves_nothing_to_defaults(tmp_path: Path) -> None:
    data = yaml.safe_load(written(tmp_path, SMALL).as_yaml())
    assert data["input"]["random"] == {
        "batch": 1, "heads": 4, "kv_heads": 2, "q_len": 80, "kv_len": 80, "head_dim": 16
    }  # fmt: skip
    assert data["baseline"] == "causal" and data["seed"] == 0 and data["check"] is True
    quest = {"block": 16, "keep": 2, "q_block": 16, "heads": "kv"}
    assert data["rows"][2]["select"] == {"quest": quest}
    assert set(data["rows"][0]) == set(Row.model_fields)


def test_the_hash_speaks_of_values_and_of_the_files_they_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVERY_NTH)
    text = SMALL + '  - {name: a, rule: {"mine.py:EveryNth": {n: 2}}}\n'
    before = written(tmp_path, text)
    assert written(tmp_path, text).sha256 == before.sha256
    assert written(tmp_path, text, "repeats=2").sha256 != before.sha256
    (tmp_path / "mine.py").write_text(EVERY_NTH + "# other\n")
    assert written(tmp_path, text).sha256 != before.sha256


# ---- overrides by a row's name


def test_a_row_is_reached_by_name_and_by_number(tmp_path: Path) -> None:
    text = SMALL.replace("name: dense", "name: v1.5 dense")
    made = written(
        tmp_path, text, "rows.window.tile=32", "rows.v1.5 dense.tile=64", "rows.2.tile=16"
    )
    assert [case.row.tile for case in made.cases] == [64, 32, 16]
    (told,) = refused(tmp_path, text, "rows.windw.tile=32")
    assert told.endswith("not 'windw' (did you mean 'window'?)")


def test_file_and_overrides_are_blamed_together(tmp_path: Path) -> None:
    told = refused(
        tmp_path,
        SMALL + "rows: []\nsed: 1\n",
        "rows.9.tile=3",
        "tile",
        "dtype=fp8",
        "rows.0.tile=[",
    )
    assert len(told) == 6
    for words in (
        "rows: written a second time at line 9, column 1",
        "c.yaml:10:1: sed: unknown key (did you mean 'seed'?)",
        "argument 'dtype=fp8': dtype: must be float16, bfloat16, float32 or float64, got 'fp8'",
        "argument 'rows.9.tile=3': rows has the entries 0 to 2",
        "argument 'tile': an override is key=value",
        "argument 'rows.0.tile=[':1:2: not YAML",
    ):
        assert sum(words in line for line in told) == 1, words


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rows.0.rule={sliding_window: 128}", "write {sliding_window: {size: 128}}, not"),
        ("rows.0.rule=causal & causal", "rules are joined by {and: [rule, …]}"),
        ("rows.0.rule=[causal, causal]", "rules are joined by {and: [rule, …]}"),
        ("rows.0.rule=sliding_window(128)", "its arguments beside it, {name: {argument: value}}"),
        ("baseline=none", "write null for no rule"),
    ],
)
def test_what_newcomers_write_is_answered_by_what_is_meant(
    tmp_path: Path, override: str, words: str
) -> None:
    (told,) = refused(tmp_path, SMALL, override)
    assert words in told


# ---- faults, planted one by one and by the dozen


def test_eight_faults_are_eight_lines(tmp_path: Path) -> None:
    told = refused(
        tmp_path,
        """\
name: planted
input: {random: {heads: 6, kv_heads: 4, q_len: 64}}
dtype: float23
sede: 3
repeats: 0
repeats: 5
rows:
  - name: a
    rule: {sliding_window: {size: 1e-3}}
  - name: b
    rule: {sliding_windw: {size: 4}}
  - name: c
    tile: [16, 16, 16]
""",
    )
    assert [line.split(": ")[0] for line in told] == [
        f"c.yaml:{at}" for at in ("2:9", "3:1", "4:1", "5:1", "5:1", "9:29", "11:12", "13:5")
    ]
    assert [line.split(": ", 2)[1] for line in told] == [
        "input.random", "dtype", "sede", "repeats", "repeats", "rows.0.rule.sliding_window.size",
        "rows.1.rule.sliding_windw", "rows.2.tile",
    ]  # fmt: skip
    for line, words in zip(
        told,
        (
            "heads must be a multiple of kv_heads, got 6 and 4",
            "got 'float23' (did you mean 'float32'?)",
            "unknown key (did you mean 'seed'?)",
            "written a second time at line 6, column 1",
            "must be at least 1, got 0",
            "must be an integer, got 0.001",
            "did you mean 'sliding_window'?",
            "tile must be",
        ),
        strict=True,
    ):
        assert words in line


def mutations() -> list[str]:
    """The small experiment, broken in many ways."""
    whole = yaml.safe_load(SMALL)
    paths = [
        ("name",), ("input",), ("input", "random"), ("input", "random", "heads"),
        ("input", "random", "q_len"), ("repeats",), ("rows",), ("rows", 0), ("rows", 0, "name"),
        ("rows", 1, "rule"), ("rows", 1, "rule", "sliding_window"),
        ("rows", 1, "rule", "sliding_window", "size"), ("rows", 1, "tile"), ("rows", 2, "select"),
        ("rows", 2, "select", "quest", "keep"), ("rows", 2, "tile"),
    ]  # fmt: skip
    values = [None, [], [1, [2]], {}, {"a": 1}, "text", -7, 10**30, 1e300, math.nan, True, ""]
    made = []
    for i, path in enumerate(paths):
        dropped, typo = copy.deepcopy(whole), copy.deepcopy(whole)
        holder, misspelt = dropped, typo
        for key in path[:-1]:
            holder, misspelt = holder[key], misspelt[key]
        value = holder.pop(path[-1])
        if isinstance(misspelt, dict):
            misspelt[f"{path[-1]}x"] = misspelt.pop(path[-1])
        made += [dump(dropped), dump(typo)]
        for j in range(4):
            changed = copy.deepcopy(whole)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = [value] if j == 3 else values[(3 * i + j) % len(values)]
            made.append(dump(changed))
    lines = SMALL.splitlines()
    made += [
        "", "\n\n", "# nothing\n", "just words", "- a\n- b\n", "42", "null", "\x00", "a: \x07",
        "\ufeff" + SMALL, "%YAML 3.0\n---\n" + SMALL, SMALL + "---\n" + SMALL, "*nobody", "a: *b",
        "[" * 5000, "{" * 5000, "a: " * 300, SMALL.replace("  ", "\t"), SMALL.replace(":", ""),
        SMALL.replace("}", ""), SMALL.replace("{", ""), SMALL.replace("'", '"') + "'", SMALL[:-30],
        SMALL + "  - {name: x, rule: &a {and: [*a]}}\n", "? [1]\n: 2\n" + SMALL, "1: 2\n" + SMALL,
        SMALL + "  - {name: x, rule: !!binary aGk=}\n", SMALL + "  - {name: x, rule: !!set {causal}}\n",
        SMALL + "  - {name: x, rule: !!python/object:os.system {}}\n",
        SMALL + "  - {name: x, rule: 'os:system'}\n", SMALL + "  - {name: x, rule: ':'}\n",
        SMALL + "  - {name: x, rule: '.py:A'}\n", SMALL + "  - {name: x, rule: 'a..b:c'}\n",
        SMALL + "  - {name: x, rule: 'math:pi'}\n", SMALL + "  - {name: x, rule: {'builtins:dict': {}}}\n",
        SMALL + f"seed: {'9' * 5000}\n", SMALL + "seed: 1e400\n", SMALL + "baseline: {or: []}\n",
        SMALL + "  - {name: x, rule: {not: {not: {not: causal}}}}\n",
        "x0: &x0 [a, a]\n" + "".join(f"x{i + 1}: &x{i + 1} [{', '.join([f'*x{i}'] * 9)}]\n" for i in range(9)),
        *("\n".join(lines[:i] + [lines[i] + lines[i]] + lines[i + 1 :]) for i in range(1, len(lines))),
        *("\n".join(lines[:i] + lines[i + 1 :]) for i in range(1, len(lines))),
    ]  # fmt: skip
    return made


def test_a_broken_configuration_is_never_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = refused_ = 0
    for text in mutations():
        try:
            made = written(tmp_path, text)
            # Where the mutant lost its input, the sample of 1024 tokens stands in: valid, but slow.
            small_ = made.config.input.sample is None
            rows = run(made, tmp_path / "out") if small_ else []
        except ConfigError as error:
            refused_ += 1
            for line in str(error).splitlines():
                # Beside the folder, which is pytest's.
                assert len(line.replace(str(tmp_path), "")) < 500, line
                assert "c.yaml" in line, line
                for words in PYDANTIC:
                    assert words not in line, line
        else:
            ran += 1
            assert all(row["status"] == "ok" or "\n" not in row["error"] for row in rows)
    assert ran >= 10 and refused_ >= 80


# What the validator says where nobody words it anew.
PYDANTIC = (
    "Input should", "valid integer", "valid string", "valid list", "valid number", "Field required",
    "Extra inputs", "errors.pydantic.dev", "List should", "String should", "pydantic", "Value error",
    "must be what its type says",
)  # fmt: skip


# ---- the schema for editors


def test_the_schema_names_every_key_and_part() -> None:
    made = schema()
    assert set(made["properties"]) == set(Config.model_fields)
    assert set(made["$defs"]["Row"]["properties"]) == set(Row.model_fields)
    for kind in get_args(Kind):
        written_ = json.dumps(made["$defs"][kind])
        for name, found in gallery(kind).items():
            assert f'"{name}": {{' in written_
            for argument in parameters(found):
                assert f'"{argument}"' in written_
