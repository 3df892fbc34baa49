"""What a first use gets wrong, and what is then said or shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import EVERY_NTH, SMALL, refused
from torch import Tensor

import flexsparse as fs
from flexsparse.bench.way_tables import way_tables
from flexsparse.experiment.load import load
from flexsparse.experiment.run import run
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.measure.calibration import main
from flexsparse.selectors import Quest


@dataclass(frozen=True, eq=False, kw_only=True)
class Fixed(fs.Selector):
    """Scores that are given."""

    table: Tensor

    def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
        return self.table


def inputs(length: int = 65) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, length, 16, generator=draw)
    k, v = torch.randn(2, 1, 2, length, 16, generator=draw)
    return q, k, v


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200])
def test_one_score_for_all_rows_is_that_score_in_each(length: int) -> None:
    q, k, _ = inputs(length)
    grid = fs.Grid(length, length)
    rows, blocks = grid.shape(16, 8)
    table = torch.randn(1, 2, 1, blocks, generator=torch.Generator().manual_seed(1))
    sizes: dict[str, Any] = {"block": 8, "q_block": 16, "keep": 2}
    one = Fixed(table=table, **sizes).select(q, k, grid, Causal())
    each = Fixed(table=table.repeat(1, 1, rows, 1), **sizes).select(q, k, grid, Causal())
    assert torch.equal(one.indices, each.indices)


def test_a_score_of_another_shape_is_told_how() -> None:
    q, k, _ = inputs()
    wrong = Fixed(table=torch.zeros(1, 2, 3, 9), block=8, q_block=16)
    words = (
        r"B 1, H one of \[1, 2, 4\], R 5 or 1 and C 9, got \[1, 2, 3, 9\]: grid.shape\(self.q_block"
    )
    with pytest.raises(fs.FlexSparseError, match=words):
        wrong.select(q, k, fs.Grid(65, 65), Causal())


def test_a_selection_says_how_many_candidates_rows_have() -> None:
    ids = torch.tensor([[[[3, 1, 3, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]]])
    made = fs.Selection.from_indices(ids, kv_len=4, q_len=3)
    assert "[1, 1, 3, 4] of 4 candidates, 0 to 4 a row, mean 2, q_len=3" in repr(made)
    same = fs.Selection.from_indices(ids[:, :, 1:2], kv_len=4, q_len=1)
    assert "4 candidates, 4 a row, q_len=1" in repr(same)
    assert "a row" not in repr(made.to("meta"))
    said: list[str] = []

    def traced(indices: Tensor) -> Tensor:
        chosen = fs.Selection.from_indices(indices, kv_len=4, q_len=3, out_of_range="drop")
        said.append(repr(chosen))
        return chosen.indices

    torch.func.vmap(traced)(ids[None])
    torch.export.export(_Module(traced), (ids,))
    assert said and not any("a row" in one for one in said)


class _Module(torch.nn.Module):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def forward(self, indices: Tensor) -> Tensor:
        chosen: Tensor = fs.Selection.from_indices(
            indices, kv_len=4, q_len=3, out_of_range="drop"
        ).indices
        return chosen


def test_a_picture_of_what_has_its_own_lengths() -> None:
    made = fs.Selection.from_indices(torch.tensor([[[[0]]]]), kv_len=4, q_len=1)
    assert fs.picture(made) == fs.picture(made, 1, 4) == "#..."
    with pytest.raises(fs.FlexSparseError, match="1 queries and 4 keys, got q_len=16"):
        fs.picture(made, 16)
    with pytest.raises(fs.FlexSparseError, match=r"selector Quest: call \.select"):
        fs.picture(Quest(), 64)  # type: ignore[arg-type]
    layout = fs.build_layout(select=made, grid=fs.Grid(1, 4), heads=(1, 1))
    with pytest.raises(fs.FlexSparseError, match=r"tiles of a layout are shown by plot\(layout\)"):
        fs.picture(layout)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    layout = fs.build_layout(rule=Causal(), grid=fs.Grid(4, 4), heads=(1, 1))
    for make in (
        lambda: fs.build_layout(grid=fs.Grid(4, 4), heads=(1, 1), device="cuda"),
        lambda: layout.to("cuda:1"),
    ):
        with pytest.raises(fs.FlexSparseError, match=r"'cuda(:1)?' is not there"):
            make()


def test_budgets_of_heads_are_a_tuple() -> None:
    with pytest.raises(fs.FlexSparseError, match=r"as a tuple, got a list: write keep=\(2, 6\)"):
        Quest(keep=[2, 6])  # type: ignore[arg-type]


def test_a_misspelt_argument_and_a_wrong_value_are_told_at_once(tmp_path: Path) -> None:
    text = SMALL.replace("keep: 2", "keep: 1.5, blok: 3")
    said = refused(tmp_path, text)
    assert len(said) == 2
    assert "quest has no argument 'blok' (did you mean 'block'?)" in "".join(said)
    assert "Quest keep must be an int of at least 1" in "".join(said)


def test_what_keeps_a_plan_from_moving_is_named_alone() -> None:
    q, k, v = inputs()
    plan = fs.make_plan(q[:, :, -1:], k, v, rule=SlidingWindow(8))
    with pytest.raises(
        fs.FlexSparseError, match=r"needs q_offset as an int tensor on cpu, got the int 64: "
    ):
        plan.advance(plan.layout())  # fmt: skip
    plan = fs.make_plan(
        q[:, :, -1:], k, v, rule=SlidingWindow(8), q_offset=torch.tensor([9]), empty="error"
    )
    with pytest.raises(
        fs.FlexSparseError, match="advance needs a plan without empty=.error.: make"
    ):
        plan.advance(plan.layout())


def test_a_plan_is_told_what_it_was_made_for() -> None:
    q, k, v = inputs()
    plan = fs.make_plan(q, k, v, rule=Causal())
    chosen = Quest(block=16, q_block=16, keep=2).select(q, k, fs.Grid(65, 65), Causal())
    with pytest.raises(fs.FlexSparseError, match="made without a selection, and is asked with one"):
        plan.layout(chosen)
    with pytest.raises(fs.FlexSparseError, match="a smaller tile= allows finer chunks"):
        plan.chunk(3, 65)


def test_flex_on_a_cpu_says_how_to_do_without_gradients() -> None:
    q, k, v = inputs()
    with pytest.raises(
        fs.FlexSparseError, match=r"no backward on CPU \(call it under torch.no_grad"
    ):
        fs.attention(q.requires_grad_(), k, v, rule=Causal(), backend="flex")


def test_a_rule_made_inside_a_compiled_function_is_told_where_to_make_it() -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fs.attention(q, k, v, rule=SlidingWindow(4), backend="tiles")

    with pytest.raises(
        Exception, match="a rule made or composed inside torch.compile: make it out"
    ):
        torch.compile(inside, fullgraph=True, backend="eager")(*inputs())


def test_there_are_no_predictions_on_a_cpu(tmp_path: Path) -> None:
    way = {
        "ms": 1.0,
        "predicted_ms": None,
        "job": None,
        "backend": "tiles",
        "tile": [16, 16],
        "pack": "fold",
    }
    ways = {
        "box": {"copy_bytes_per_s": 1.0, "flops_per_s": 1.0, "processors": 1},
        "ways": [way],
        "chosen": way,
        "every": False,
    }
    record = {"name": "a", "ways": ways}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"name": "a", "ways": None}))
    with pytest.raises(SystemExit, match="no predictions in .*rows.jsonl.* on a CPU nothing"):
        main([str(tmp_path / "rows.jsonl")])
    (made,) = way_tables([record])
    assert "no choice was predicted, as none is on a CPU" in str(made.title)


def test_a_plan_says_what_selects_and_that_it_chose_once() -> None:
    q, k, v = inputs()
    quest = Quest(block=8, keep=2, q_block=8)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=quest)
    (line,) = [line for line in str(plan).splitlines() if line.startswith("  select ")]
    anew = "plan.layout(selector.select(q, k, plan.grid, plan.rule))"
    assert "Quest(block=8, keep=2" in line and "chose once" in line and anew in line
    chosen = quest.select(q, k, plan.grid, plan.rule)
    given = fs.make_plan(q, k, v, rule=Causal(), select=chosen)
    assert "  select   at most 2 of 9 blocks of 8 keys for each 8 queries\n" in str(given)
    assert "  select   none\n" in str(fs.make_plan(q, k, v, rule=Causal()))
    for made in (plan, given):
        with pytest.raises(fs.FlexSparseError) as caught:
            made.layout()
        assert anew in str(caught.value)
    # The remedy is one: other queries, and what they choose.
    other = -q
    layout = plan.layout(quest.select(other, k, plan.grid, plan.rule))
    assert not torch.equal(layout.select.indices, chosen.indices)  # type: ignore[union-attr]
    true = fs.reference(other, k, v, rule=Causal(), select=quest)
    found = plan.run(other, k, v, layout).out
    assert torch.allclose(found.double(), true.out, atol=1e-4)


def test_a_budget_says_what_it_assumes() -> None:
    q, k, v = inputs()
    layout = fs.build_layout(rule=Causal(), grid=fs.Grid(65, 65), heads=(4, 2), block_size=16)
    assumed = layout.budget()
    assert "assumed   head dims 128 of K and 128 of V, 2 bytes a number" in str(assumed)
    known = fs.make_plan(q, k, v, rule=Causal(), tile=16).budget()
    assert known.assumed is None and "assumed" not in str(known)
    # As many keys, of 32 numbers of 4 bytes against 256 of 2.
    assert known.kv_bytes * 4 == assumed.kv_bytes


@pytest.mark.parametrize("fallback", [None, "self"])
def test_a_report_tells_rows_that_see_no_key(fallback: Any) -> None:
    q, k, v = inputs(200)
    select = Quest(block=8, keep=1, q_block=32).select(q, k, fs.Grid(200, 200), Causal())
    call: dict[str, Any] = {"rule": Causal(), "select": select, "fallback": fallback}
    report = fs.check(q, k, v, **call)
    lse = fs.reference(q, k, v, **call).lse
    none = int((lse == -torch.inf).sum())
    assert report.ok and report.unseeing == (none, 800)
    assert bool(none) == (fallback is None)
    said = f"{none:,} of 800 rows see no key"
    assert (said in str(report)) == bool(none) and (said in report._repr_html_()) == bool(none)
    for remedy in ("fallback='self'", "empty='error'", "a q_block no wider than the block"):
        assert (remedy in str(report)) == bool(none)
    narrow = Quest(block=8, keep=1, q_block=8)
    assert fs.check(q, k, v, rule=Causal(), select=narrow).unseeing == (0, 800)


def test_a_rule_without_a_selection_has_fewer_remedies() -> None:
    q, k, v = inputs()
    report = fs.check(q, k, v, rule=Causal() & (lambda b, h, q, kv: q > 2))
    assert report.unseeing == (12, 260)
    assert "empty='error'" in str(report) and "fallback" not in str(report)


def test_a_cpu_plan_says_why_it_weighed_no_smaller_tile() -> None:
    quest = Quest(block=16, keep=2, q_block=16)
    few = fs.make_plan(*inputs(200), rule=Causal(), select=quest, backend="tiles", pack="fold")
    assert "160,000 pairs are too few to weigh smaller ones" in str(few)
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 500, 32, generator=draw)
    k, v = torch.randn(2, 1, 2, 500, 32, generator=draw)
    many = fs.make_plan(q, k, v, rule=Causal(), select=quest)
    assert many.tile != (128, 128) and "times the pairs of 128x128" in str(many)


def test_what_is_asked_for_is_a_reason() -> None:
    q, k, v = inputs(200)
    made = {"rule": Causal(), "select": Quest(block=16, keep=2, q_block=16)}
    for pack in ("identity", "fold", "pack"):
        plan = fs.make_plan(q, k, v, **made, tile=(64, 32), pack=pack)  # type: ignore[arg-type]
        assert "a tile of 64x32 was asked for" in plan.reasons and "as asked" in str(plan)
    odd = fs.make_plan(q, k, v, **made, tile=100)  # type: ignore[arg-type]
    assert "a tile of 100x100 was asked for; no multiple of 16" in str(odd)
    none = fs.make_plan(q, k, v, **made, tile=64, backend="gather")  # type: ignore[arg-type]
    assert "a tile of 64x64 was asked for, but gather visits none" in str(none)
    assert "asked for" not in str(fs.make_plan(q, k, v, rule=Causal()))


def test_a_result_and_a_cache_are_told_in_a_line() -> None:
    q, k, v = inputs()
    quest = Quest(block=8, keep=2, q_block=1)
    plan = fs.make_plan(q, k, v, rule=Causal())
    assert repr(plan.run(q, k, v)) == "Result(out [1, 4, 65, 16] float32 on cpu, by tiles)"
    with_lse = repr(plan.run(q, k, v, return_lse=True))
    assert with_lse.endswith("lse [1, 4, 65] float32 on cpu, by tiles)")
    cache = quest.cache(k[:, :, :60], capacity=80)
    assert repr(cache).startswith("PageCache(Quest(block=8, keep=2")
    assert repr(cache).endswith("60 of 80 keys [1, 2, n, 16] on cpu)")
    cache.append(k[:, :, :1])
    assert "61 of 80 keys" in repr(cache)


def test_a_cache_beside_buffers_of_a_capacity() -> None:
    """Its selection of the keys so far does not fit a plan over buffers, and the error says what does."""
    q, k, v = inputs(200)
    room = torch.zeros(2, 1, 2, 256, 16)
    room[0, :, :, :200], room[1, :, :, :200] = k[0], v[0]
    cache = Quest(block=16, keep=3, q_block=1).cache(k, capacity=256)
    query, at = q[:, :, -1:], torch.tensor([199])
    grid = fs.Grid(1, 256, q_offset=at)
    chosen = cache.select(query, grid, Causal())
    plan = fs.make_plan(query, *room, rule=Causal(), select=chosen, q_offset=at)
    so_far = cache.select(query, fs.Grid(1, 200), Causal())
    with pytest.raises(fs.FlexSparseError) as caught:
        plan.layout(so_far)
    assert "kv_len 200 but the call has 256" in str(caught.value)
    assert "fs.Grid(1, 256, q_offset=...)" in str(caught.value)
    keys, values = k, v
    for step in range(3):
        out = plan.run(query, *room, plan.layout(cache.select(query, grid, Causal()))).out
        true = fs.reference(query, keys, values, rule=Causal(), select=so_far).out
        assert torch.allclose(out.double(), true, atol=1e-5)
        new = inputs(201 + step)
        keys, values = (
            torch.cat([x, n[:, :, -1:]], 2) for x, n in zip((keys, values), new[1:], strict=True)
        )
        cache.append(keys[:, :, -1:])
        at += 1
        room[0, :, :, 200 + step], room[1, :, :, 200 + step] = keys[0, :, -1], values[0, :, -1]
        so_far = cache.selector.select(query, keys, fs.Grid(1, 201 + step), Causal())


def test_a_kept_configuration_runs_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir(), other.mkdir()
    (home / "mine.py").write_text(EVERY_NTH)
    text = (
        SMALL[: SMALL.index("rows:")] + 'rows:\n  - {name: a, rule: {"mine.py:EveryNth": {n: 2}}}\n'
    )
    (home / "c.yaml").write_text(text)
    monkeypatch.chdir(home)
    made = load("c.yaml")
    run(made, Path("results/small"))
    (other / "printed.yaml").write_text(made.as_yaml())
    kept = home / "results" / "small" / "config.yaml"
    assert str(tmp_path) not in kept.read_text()
    monkeypatch.chdir(other)
    for file in (kept, other / "printed.yaml"):
        (case,) = load(file).cases
        assert case.rule is not None and case.rule.n == 2  # type: ignore[attr-defined]
    # Together with what it names, the kept one may move.
    home.rename(tmp_path / "moved")
    assert load(tmp_path / "moved" / "results" / "small" / "config.yaml").cases
