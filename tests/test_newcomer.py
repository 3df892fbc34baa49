"""What a first use gets wrong, and what is then said or shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import SMALL, refused
from torch import Tensor

import flexsparse as fs
from flexsparse.bench.way_tables import way_tables
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
