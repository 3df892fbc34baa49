"""CUDA graphs: from raw indices to attention is captured once, and replayed on other indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.kernels.columns import Room
from flexsparse.masks import Causal
from flexsparse.selectors import Quest

pytestmark = pytest.mark.gpu


def captured(step: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """``step`` in a graph, after the runs that compile what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def drawn(lengths: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((2, 8, lengths[0], 64), (2, 2, lengths[1], 64), (2, 2, lengths[1], 64))
    return tuple(torch.randn(s, device="cuda", dtype=dtype) for s in shapes)


@pytest.mark.parametrize(
    ("lengths", "q_block", "kv_block", "rule"),
    [
        ((512, 512), 128, 128, Causal()),
        ((512, 512), 64, 32, Causal()),
        ((512, 512), 1, 1, Causal()),
        ((1, 1024), 1, 64, None),
    ],
    ids=["blocks", "small blocks", "tokens", "decode"],
)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_other_indices_replay(
    lengths: tuple[int, int], q_block: int, kv_block: int, rule: Any, heads: int
) -> None:
    q, k, v = drawn(lengths)
    rows, candidates = -(-lengths[0] // q_block), -(-lengths[1] // kv_block)
    draw = torch.Generator().manual_seed(heads)

    def choice() -> Tensor:
        shape = (2, heads, rows, min(candidates, 8))
        return torch.randint(-1, candidates, shape, generator=draw).cuda()

    def selection(out_of_range: Any) -> fs.Selection:
        return fs.Selection.from_indices(
            indices, kv_len=lengths[1], q_len=lengths[0], kv_block=kv_block, q_block=q_block,
            out_of_range=out_of_range,
        )  # fmt: skip

    indices = choice()
    plan = fs.make_plan(q, k, v, rule=rule, select=selection("error"))
    graph, out = captured(lambda: plan.run(q, k, v, plan.layout(selection("drop"))).out)
    for _ in range(3):
        indices.copy_(choice())
        graph.replay()
        true = fs.reference(q, k, v, rule=rule, select=selection("error")).out
        torch.testing.assert_close(out.double(), true, atol=5e-3, rtol=5e-3)


def test_a_column_that_outgrows_its_room_is_told_after_replay() -> None:
    indices = torch.arange(64, device="cuda").view(1, 1, 64, 1)
    q = torch.randn(1, 2, 8192, 64, device="cuda", requires_grad=True)
    k, v = (torch.randn(1, 2, 8192, 64, device="cuda") for _ in range(2))

    def selection(out_of_range: Any) -> fs.Selection:
        return fs.Selection.from_indices(
            indices, kv_len=8192, q_len=8192, kv_block=128, q_block=128, out_of_range=out_of_range
        )

    plan = fs.make_plan(q, k, v, select=selection("error"))
    object.__setattr__(plan, "terms", plan.terms._replace(columns=Room(2, 2)))
    graph, layout = captured(lambda: plan.layout(selection("drop")))
    graph.replay()
    plan.raise_pending(layout)
    indices.fill_(3)
    graph.replay()
    with pytest.raises(fs.FlexSparseError, match="visited by 64 rows of full tiles"):
        plan.raise_pending(layout)


def test_an_empty_row_is_told_after_replay() -> None:
    q, k, v = drawn((64, 256))
    indices = torch.zeros(1, 1, 64, 2, dtype=torch.int64, device="cuda")

    def selection(out_of_range: Any) -> fs.Selection:
        return fs.Selection.from_indices(
            indices, kv_len=256, q_len=64, kv_block=16, out_of_range=out_of_range
        )

    plan = fs.make_plan(q, k, v, select=selection("error"), empty="error")
    graph, layout = captured(lambda: plan.layout(selection("drop")))
    graph.replay()
    plan.raise_pending(layout)
    indices[0, 0, 5] = -1
    graph.replay()
    with pytest.raises(fs.FlexSparseError, match="sees no key"):
        plan.raise_pending(layout)


def test_a_selector_chooses_anew_inside_a_graph() -> None:
    q, k, v = drawn((512, 512))
    selector = Quest(block=64, keep=3, q_block=128)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=selector)

    def step() -> Tensor:
        chosen = selector.select(q, k, plan.grid, plan.rule)
        return plan.run(q, k, v, plan.layout(chosen)).out

    graph, out = captured(step)
    q.copy_(torch.randn_like(q))
    graph.replay()
    true = fs.reference(q, k, v, rule=Causal(), select=selector).out
    torch.testing.assert_close(out.double(), true, atol=5e-3, rtol=5e-3)
