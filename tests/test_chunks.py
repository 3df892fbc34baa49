"""Queries of a plan in parts: chunk by chunk is the whole, and nothing is found again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexsparse as fs
from flexsparse.intervals import refine
from flexsparse.masks import Alibi, AttentionSink, Causal, Document, SlidingWindow
from tests.test_updates import LENGTHS, drawn, same, tensors


def streaming() -> fs.MaskRule:
    return Causal() & (SlidingWindow(40) | AttentionSink(3))


def cuts(length: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def kinds(length: int) -> dict[str, dict[str, Any]]:
    each = torch.tensor([-5, 11])
    ids = (torch.arange(length) // 50).expand(2, -1).contiguous()
    return {
        "rule": {"rule": streaming()},
        "offsets": {"rule": streaming(), "q_offset": each},
        "int32 offsets": {"rule": Causal(), "q_offset": each.int()},
        "from 0": {"rule": Causal() & Document(ids), "q_offset": 0},
        "tokens": {"rule": Causal(), "select": drawn(length, length, 0, kv_block=1)},
        "blocks": {"select": drawn(length, length, 1, heads=4, q_block=8)},
        "wide blocks": {"rule": Causal(), "select": drawn(length, length, 0, heads=1, q_block=32)},
        "packed": {"rule": Causal(), "select": drawn(length, length, 0, heads=2), "pack": "pack"},
        "packed rule": {"rule": streaming(), "q_offset": each, "pack": "pack"},
        "fallback": {"rule": Causal(), "select": drawn(length, length, 2), "fallback": "self"},
        "sanitize": {"rule": Causal(), "sanitize": True},
        "score": {"rule": Causal(), "score": Alibi(torch.tensor([0.1, 0.2, 0.3, 0.4]))},
        "sink": {"rule": Causal(), "sink": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    }


@pytest.mark.parametrize("kind", kinds(1))
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_whole(kind: str, length: int) -> None:
    options = {"pack": "identity"} | kinds(length)[kind] | {"tile": (16, 32)}
    inputs = [t.requires_grad_() for t in tensors(length, length)]
    q, k, v = inputs
    plan = fs.make_plan(*inputs, **options)
    whole = plan.run(*inputs, return_lse=True)
    parts = []
    for start, stop in cuts(length, 64):
        chunk = plan.chunk(start, stop)
        parts.append(chunk.run(q[:, :, start:stop], k, v, return_lse=True))
        assert chunk.first is not None
        same(chunk.first, fs.make_plan(
            q[:, :, start:stop], k, v, **options | beginning(options, start, stop, length)
        ).layout(chunk.first.select))  # fmt: skip
    out = torch.cat([part.out for part in parts], 2)
    lse = torch.cat([part.partial.lse for part in parts], 2)
    torch.testing.assert_close(out, whole.out)
    torch.testing.assert_close(lse, whole.partial.lse)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    seen = torch.isfinite(lse)
    losses = [(o * weight).sum() + torch.where(seen, x, 0).sum()
              for o, x in ((whole.out, whole.partial.lse), (out, lse))]  # fmt: skip
    want, got = (torch.autograd.grad(loss, inputs) for loss in losses)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def beginning(options: Any, start: int, stop: int, length: int) -> dict[str, Any]:
    """What a plan of these queries alone would be told."""
    told: dict[str, Any] = {"q_offset": options.get("q_offset", 0) + start}
    if (select := options.get("select")) is not None:
        first, last = start // select.q_block, -(-stop // select.q_block)
        told["select"] = fs.Selection(
            select.indices[:, :, first:last], stop - start, length, select.q_block, select.kv_block
        )
    return told


@pytest.mark.parametrize("grads", [False, True])
def test_nothing_is_found_again(grads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(200, 200)
    q.requires_grad_(grads)
    select = drawn(200, 200, 0)
    plans = [
        fs.make_plan(q, k, v, rule=streaming(), tile=16),
        fs.make_plan(q, k, v, rule=streaming(), select=select, tile=16),
    ]

    def again(*args: object, **kwargs: object) -> None:
        raise AssertionError("the rule is asked about tiles again")

    monkeypatch.setattr(refine.Judge, "__call__", again)
    for plan in plans:
        for start, stop in cuts(200, plan.tile[0]):
            chunk = plan.chunk(start, stop)
            chunk.run(q[:, :, start:stop], k, v)
            assert chunk.first is not None
            assert (chunk.first.columns is not None) == grads


def test_a_chunk_of_a_chunk_and_of_another_layout() -> None:
    q, k, v = tensors(200, 200)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=drawn(200, 200, 0), tile=16)
    select = drawn(200, 200, 1)
    layout = plan.layout(select)
    chunk = plan.chunk(64, 200, layout).chunk(32, 136)
    assert "queries 32 to 135 of 136" in str(chunk)
    true = fs.reference(q, k, v, rule=Causal(), select=select).out
    part = chunk.run(q[:, :, 96:], k, v)
    torch.testing.assert_close(part.out.double(), true[:, :, 96:], atol=5e-6, rtol=1e-5)
    # A chunk is a plan: it makes layouts of other selections of its rows.
    own = drawn(104, 200, 4)
    got = chunk.run(q[:, :, 96:], k, v, chunk.layout(own)).out
    true = fs.reference(q[:, :, 96:], k, v, rule=Causal(), select=own, q_offset=96).out
    torch.testing.assert_close(got.double(), true, atol=5e-6, rtol=1e-5)


def test_a_chunk_knows_when_it_is_outdated() -> None:
    q, k, v = tensors(64, 200)
    offset = torch.tensor([0, 30])
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=offset, tile=16)
    chunk = plan.chunk(16, 64)
    layout = chunk.layout()
    offset += 1
    with pytest.raises(fs.FlexSparseError, match="has changed since"):
        chunk.run(q[:, :, 16:], k, v)
    with pytest.raises(fs.FlexSparseError, match="unknown to this chunk: cut it anew"):
        chunk.layout()
    with pytest.raises(fs.FlexSparseError, match="a chunk of a plan does not advance"):
        chunk.advance(layout)
    true = fs.reference(q, k, v, rule=Causal(), q_offset=offset).out[:, :, 16:]
    again = plan.chunk(16, 64).run(q[:, :, 16:], k, v).out
    torch.testing.assert_close(again.double(), true, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["tiles", "gather", "dense"])
@pytest.mark.parametrize("fallback", [None, "self"])
def test_a_chunk_is_outdated_by_what_is_written_into_its_whole(fallback: Any, backend: Any) -> None:
    q, k, v = tensors(64, 64)
    first, second = (drawn(64, 64, seed, kv_block=1) for seed in (0, 1))
    options: dict[str, Any] = {"rule": Causal(), "fallback": fallback, "backend": backend}
    plan = fs.make_plan(q, k, v, select=first, tile=16, **options)
    layout = plan.layout(first)
    chunk = plan.chunk(16, 64, layout=layout)
    chunk.run(q[:, :, 16:], k, v)
    plan.layout(second, into=layout)
    with pytest.raises(fs.FlexSparseError, match="layout that its lists are of was written anew"):
        chunk.run(q[:, :, 16:], k, v)
    options.pop("backend")
    true = fs.reference(q, k, v, select=second, **options).out[:, :, 16:]
    again = plan.chunk(16, 64, layout=layout).run(q[:, :, 16:], k, v).out
    torch.testing.assert_close(again.double(), true, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("start", "stop", "said"),
    [
        (0, 20, "multiples of 48 within 0..200"),
        (16, 96, "multiples of 48"),
        (96, 96, "got 96 and 96"),
        (-48, 48, "got -48 and 48"),
        (0, 240, "the last stop being 200"),
        (0.0, 48, "chunk start must be an int"),
        (0, True, "chunk stop must be an int"),
    ],
)
def test_what_is_no_chunk(start: Any, stop: Any, said: str) -> None:
    q, k, v = tensors(200, 200)
    plan = fs.make_plan(q, k, v, select=drawn(200, 200, 0, q_block=24), tile=16, pack="identity")
    with pytest.raises(fs.FlexSparseError, match=said):
        plan.chunk(start, stop)
    plan.chunk(48, 200)


def test_a_chunk_of_another_plans_layout_is_refused() -> None:
    q, k, v = tensors(64, 64)
    plan, other = (fs.make_plan(q, k, v, rule=Causal(), tile=16) for _ in range(2))
    with pytest.raises(fs.FlexSparseError, match="was not made by this plan"):
        plan.chunk(0, 16, other.first)
