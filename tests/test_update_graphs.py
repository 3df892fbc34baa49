"""CUDA graphs of a sequence that grows: position, layout and attention in one graph, replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import AttentionSink, Causal, Document, SlidingWindow
from tests.test_graphs import captured, drawn

pytestmark = pytest.mark.gpu

KEYS, PAGE = 1024, 64


@contextmanager
def nobody_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rules() -> dict[str, Any]:
    ids = (torch.arange(KEYS, device="cuda") // 300).expand(2, -1).contiguous()
    return {
        "causal": Causal(),
        "window + sink": Causal() & (SlidingWindow(200) | AttentionSink(4)),
        "document": Causal() & Document(ids),
        "none": None,
    }


def selection(indices: Tensor, out_of_range: Any = "drop") -> fs.Selection:
    return fs.Selection.from_indices(
        indices, kv_len=KEYS, q_len=1, kv_block=PAGE, out_of_range=out_of_range
    )


def pages(heads: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-1, KEYS // PAGE, (2, heads, 1, 6), generator=draw).cuda()


@pytest.mark.parametrize("name", ["causal", "window + sink", "document", "none"])
@pytest.mark.parametrize(("heads", "dtype"), [(0, torch.int32), (0, torch.int64), (2, torch.int32)])
def test_twenty_steps_of_one_graph(name: str, heads: int, dtype: torch.dtype) -> None:
    """``heads`` of 0 is a rule alone."""
    q, k, v = drawn((1, KEYS))
    rule = rules()[name]
    q_offset = torch.tensor([100, 700], device="cuda", dtype=dtype)
    indices = pages(heads or 1, 0)

    def select(out_of_range: Any = "drop") -> fs.Selection | None:
        return selection(indices, out_of_range) if heads else None

    plan = fs.make_plan(
        q, k, v, rule=rule, q_offset=q_offset, select=select("error"), backend="flex"
    )
    layout = plan.layout(select())

    def step() -> Tensor:
        plan.advance(layout, select=select())
        return plan.run(q, k, v, layout).out

    graph, out = captured(step)
    begin = q_offset.clone()
    where = [t.data_ptr() for t in (*layout.lists, *layout.tables)]
    for i in range(1, 21):
        indices.copy_(pages(heads or 1, i))
        q.copy_(torch.randn_like(q))
        with nobody_waits():
            graph.replay()
        assert torch.equal(q_offset, begin + i)
        fresh = fs.make_plan(
            q, k, v, rule=rule, q_offset=q_offset.clone(), select=select("error"), backend="flex"
        )
        assert fresh.first is not None
        for ours, theirs in zip(layout.tile_maps(), fresh.first.tile_maps(), strict=True):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(out, fresh.run(q, k, v).out, atol=2e-3, rtol=2e-3)
    assert [t.data_ptr() for t in (*layout.lists, *layout.tables)] == where
    plan.raise_pending(layout)
    # Outside the graph the plan goes on from where the graph left it.
    plan.advance(layout)
    true = fs.reference(q, k, v, rule=rule, q_offset=q_offset, select=select("error")).out
    torch.testing.assert_close(plan.run(q, k, v, layout).out.double(), true, atol=5e-3, rtol=5e-3)


def test_a_step_past_the_keys_is_told_after_replay() -> None:
    q, k, v = drawn((1, KEYS))
    q_offset = torch.tensor([100, KEYS - 4], device="cuda")
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=q_offset, backend="flex")
    layout = plan.layout()
    graph, _ = captured(lambda: plan.advance(layout))
    graph.replay()
    plan.raise_pending(layout)
    graph.replay()
    assert q_offset.tolist() == [104, KEYS - 1]
    with pytest.raises(fs.FlexSparseError, match=f"past the last of {KEYS} keys"):
        plan.raise_pending(layout)


def test_the_first_step_is_not_captured() -> None:
    q, k, v = drawn((1, KEYS))
    offset = torch.tensor([1, 2], device="cuda")
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=offset)
    layout = plan.layout()
    with (
        pytest.raises(fs.FlexSparseError, match="advance once before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        plan.advance(layout)


@pytest.mark.parametrize(("q_block", "kv_block"), [(1, 1), (64, 64), (128, 128), (256, 32)])
def test_rows_are_swapped_in_a_graph(q_block: int, kv_block: int) -> None:
    q, k, v = drawn((512, 512))
    count = 512 // q_block
    draw = torch.Generator().manual_seed(0)

    def choice() -> Tensor:
        return torch.randint(-1, 512 // kv_block, (2, 2, count, 8), generator=draw).cuda()

    def select(out_of_range: Any = "drop") -> fs.Selection:
        return fs.Selection.from_indices(
            indices, kv_len=512, q_len=512, kv_block=kv_block, q_block=q_block,
            out_of_range=out_of_range,
        )  # fmt: skip

    indices, rows = choice(), torch.tensor([0, -1, count - 1], device="cuda")
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select("error"))
    layout = plan.layout(select())

    def step() -> Tensor:
        plan.layout(select(), into=layout, rows=rows)
        return plan.run(q, k, v, layout).out

    graph, out = captured(step)
    for i in range(4):
        rows.copy_(torch.tensor([i % count, count // 2, -1]))
        at = rows[rows >= 0]
        indices[:, :, at] = choice()[:, :, at]
        with nobody_waits():
            graph.replay()
        for ours, theirs in zip(layout.lists, plan.layout(select()).lists, strict=True):
            assert torch.equal(ours, theirs)
        true = fs.reference(q, k, v, rule=Causal(), select=select("error")).out
        torch.testing.assert_close(out.double(), true, atol=5e-3, rtol=5e-3)


def test_a_step_outside_a_graph_makes_nobody_wait() -> None:
    q, k, v = drawn((1, KEYS))
    offset = torch.tensor([1, 2], device="cuda")
    one, two = selection(pages(2, 0)), selection(pages(2, 1))
    plan = fs.make_plan(
        q, k, v, rule=rules()["document"], q_offset=offset, select=one, backend="flex"
    )
    layout = plan.layout(one)
    plan.run(q, k, v, plan.advance(layout))
    with nobody_waits():
        plan.advance(layout, by=3, select=two)
        plan.layout(one, into=layout)
        plan.layout(two, into=layout, rows=range(1))
        plan.run(q, k, v, layout)


def test_chunks_on_the_device() -> None:
    q, k, v = (t.requires_grad_() for t in drawn((640, 640)))
    plan = fs.make_plan(q, k, v, rule=Causal() & (SlidingWindow(200) | AttentionSink(4)))
    whole = plan.run(q, k, v).out
    parts = [
        plan.chunk(start, min(start + 256, 640)).run(q[:, :, start : start + 256], k, v).out
        for start in range(0, 640, 256)
    ]
    out = torch.cat(parts, 2)
    torch.testing.assert_close(out, whole, atol=2e-3, rtol=2e-3)
    want, got = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (whole, out))
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
