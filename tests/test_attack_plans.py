"""Plans led astray: steps, chunks and packed heads that were not thought of, each held to the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.choice import BackendName
from flexsparse.masks import Causal, Document, SlidingWindow
from tests.oracle import close

KEYS = 64


def inputs(q_len: int = 40, group: int = 2, batch: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(q_len)
    shapes = [(batch, 2 * group, q_len, 8)] + 2 * [(batch, 2, KEYS, 8)]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def drawn(seed: int, q_len: int = 40, *, keep: int = 5, q_block: int = 1, kv_block: int = 1) -> Any:
    draw = torch.Generator().manual_seed(seed)
    shape = (2, 2, -(-q_len // q_block), keep)
    ids = torch.randint(-1, -(-KEYS // kv_block), shape, generator=draw)
    return fs.Selection.from_indices(
        ids, q_len=q_len, kv_len=KEYS, q_block=q_block, kv_block=kv_block
    )


@pytest.mark.parametrize("group", [1, 2, 3, 7, 48])
@pytest.mark.parametrize("selected", [False, True])
def test_the_decode_kernel_takes_packed_heads_of_any_number(group: int, selected: bool) -> None:
    reach = torch.randint(1, KEYS, (2 * group,), generator=torch.Generator().manual_seed(group))
    rule = fs.MaskRule.of(lambda b, h, q, kv: (kv <= q) & (q - kv < reach[h]))
    for q_len, tile in itertools.product((1, 2, 9), (None, 33)):
        if q_len * group > 128:
            continue
        q, k, v = inputs(q_len, group)
        select = drawn(group, q_len) if selected else None
        options: dict[str, Any] = {"rule": rule, "select": select}
        plan = fs.make_plan(q, k, v, **options, backend="decode", pack="pack", tile=tile)
        close(plan.run(q, k, v).out, fs.reference(q, k, v, **options).out, 5e-5)


def test_a_position_advances_beside_lists_of_each_sequence() -> None:
    q, k, v = inputs()
    offset = torch.tensor(3)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=drawn(0), q_offset=offset, tile=16)
    layout = plan.layout(drawn(0))
    plan.advance(layout, by=2, select=drawn(1))
    true = fs.reference(q, k, v, rule=Causal(), select=drawn(1), q_offset=5).out
    close(plan.run(q, k, v, layout).out, true)


def test_a_step_that_is_refused_has_not_moved() -> None:
    q, k, v = inputs()
    offset = torch.tensor([0, 3])
    first = drawn(0, keep=1, q_block=40, kv_block=16)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=first, q_offset=offset, tile=16)
    layout = plan.layout(first)
    with pytest.raises(fs.FlexSparseError, match="room for 1 tiles a row"):
        plan.advance(layout, by=1, select=drawn(0, keep=3, q_block=40, kv_block=16))
    assert offset.tolist() == [0, 3]
    close(
        plan.run(q, k, v, layout).out,
        fs.reference(q, k, v, rule=Causal(), select=first, q_offset=offset).out,
    )


def inference_offset() -> Tensor:
    with torch.inference_mode():
        return torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("offset", "by", "said"),
    [
        (torch.tensor([0, 3], dtype=torch.int32), 2**40, r"by must be within 2 \*\* 30"),
        (torch.tensor([0, 3], dtype=torch.int32), torch.tensor(2**40), "past the last of 64 keys"),
        (torch.tensor([0, 3], dtype=torch.int32), torch.tensor(-(2**33)), r"2 \*\* 30 before the first key"),
        (torch.tensor(3).expand(2), 1, "is expanded from one number"),
        (inference_offset(), 1, "was made in inference mode"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_taken(offset: Tensor, by: Any, said: str) -> None:
    q, k, v = inputs()
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=offset, tile=16)
    layout = plan.layout()
    before = offset.tolist()
    with pytest.raises(fs.FlexSparseError, match=said):
        plan.advance(layout, by=by)
    assert offset.tolist() == before


def test_a_step_leaves_no_table_of_rule_or_score() -> None:
    q, k, v = inputs()
    short = torch.randn(45)
    score = fs.ScoreRule.of(lambda s, b, h, q, kv: s + short[q])
    plan = fs.make_plan(q, k, v, rule=Causal(), score=score, q_offset=torch.tensor(3), tile=16)
    with pytest.raises(fs.FlexSparseError, match=r"score <lambda> .* reads short float32\[45\] at"):
        plan.advance(plan.layout(), by=20)
    offset = torch.tensor(3)
    rule = Causal() & Document(torch.arange(KEYS) // 9)
    plan = fs.make_plan(q, k, v, rule=rule, q_offset=offset, tile=16)
    layout = plan.layout()
    with pytest.raises(fs.FlexSparseError, match="or before offset 0"):
        plan.advance(layout, by=-5)
    plan.advance(layout, by=-3)
    close(plan.run(q, k, v, layout).out, fs.reference(q, k, v, rule=rule, q_offset=0).out)


def test_a_chunk_of_an_offset_that_keeps_no_count() -> None:
    q, k, v = inputs()
    with torch.inference_mode():
        offset = torch.tensor([0, 3])
        plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=offset, tile=16)
        offset += 3
        part = plan.chunk(16, 40).run(q[:, :, 16:], k, v).out
        close(part, fs.reference(q, k, v, rule=Causal(), q_offset=offset).out[:, :, 16:])


def test_a_chunk_of_one_row_takes_selections_of_its_own() -> None:
    q, k, v = inputs()
    plan = fs.make_plan(q, k, v, select=drawn(0, q_block=16), tile=16)
    chunk = plan.chunk(16, 32)
    own = drawn(1, 16, q_block=16)
    got = chunk.run(q[:, :, 16:32], k, v, chunk.layout(own)).out
    close(got, fs.reference(q[:, :, 16:32], k, v, select=own).out)


@pytest.mark.parametrize("backend", ["tiles", "gather"])
def test_packed_heads_of_lengths_left_open(backend: Any) -> None:
    rule = Causal()

    def own(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        select = fs.Selection.from_indices(
            ids, q_len=q.shape[2], kv_len=k.shape[2], out_of_range="drop"
        )
        return fs.attention(q, k, v, rule=rule, select=select, backend=backend, pack="pack")

    torch._dynamo.reset()
    compiled = torch.compile(own, fullgraph=True, dynamic=True, backend="aot_eager")
    for q_len in (33, 17):
        q, k, v = inputs(q_len)
        select = drawn(q_len, q_len)
        true = fs.reference(q, k, v, rule=rule, select=select).out
        close(compiled(q, k, v, select.indices), true)


def test_a_selector_that_nobody_made_a_dataclass() -> None:
    class Given(fs.Selector):
        depth: int = 3

    class Overridden(fs.Selector):
        keep: int = 3

    class Made(fs.Selector):
        keep: int

        def __init__(self, keep: int) -> None:
            super().__init__(keep=keep)

    for make in (lambda: Given(block=16, depth=4), Overridden):  # type: ignore[call-arg]
        with pytest.raises(fs.FlexSparseError, match="has fields .* but is no dataclass"):
            make()
    assert Made(3).keep == 3


def test_a_rule_whose_default_nobody_would_see() -> None:
    class Narrow(SlidingWindow):
        size: int = 3

    with pytest.raises(fs.FlexSparseError, match="has fields .* but is no dataclass"):
        Narrow()  # type: ignore[call-arg]


@pytest.mark.parametrize("backend", ["tiles", "dense", "gather"])
def test_rows_whose_every_score_is_minus_infinity_have_gradients(backend: BackendName) -> None:
    """They weigh nothing, like rows that see nothing: 0, not NaN."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=draw, requires_grad=True) for _ in range(3))
    bias = torch.zeros(20)
    bias[[0, 7]] = -torch.inf
    options: dict[str, Any] = {
        "rule": Causal(), "score": lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx],
    }  # fmt: skip
    if backend == "gather":
        each = torch.arange(20)[None, None, :, None]
        options["select"] = fs.Selection.from_indices(each, q_len=20, kv_len=20)
    true = fs.reference(q, k, v, **options)
    assert true.out[0, :, 0].eq(0).all() and true.lse[0, :, 0].eq(-torch.inf).all()
    wanted = torch.autograd.grad(true.out.square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in wanted)
    out = fs.attention(q, k, v, backend=backend, **options)
    assert isinstance(out, Tensor)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
