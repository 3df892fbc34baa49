"""What users of masks met elsewhere, held as promises: lengths, offsets, padding, tables, messages."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import close, dense
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexsparse as fs
from flexsparse.device import compiles
from flexsparse.masks import (
    Alibi,
    AttentionSink,
    Causal,
    Document,
    HeadBias,
    LeftPadding,
    PrefixLM,
    RightPadding,
    SlidingWindow,
    Softcap,
)

LENGTHS = [1, 7, 63, 64, 65, 200]


def tensors(
    q_len: int, kv_len: int, *, batch: int = 1, heads: tuple[int, int] = (2, 2), dim: int = 32
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    q = torch.randn(batch, heads[0], q_len, dim, generator=draw)
    return [q] + [torch.randn(batch, heads[1], kv_len, dim, generator=draw) for _ in range(2)]


def index(q_len: int, kv_len: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Positions of the queries, as a column, and of the keys, as a row."""
    return torch.arange(offset, offset + q_len)[:, None], torch.arange(kv_len)[None, :]


def drawn(*shape: int, low: int = 0, high: int = 2) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7))


# Tables that a rule reads


@pytest.mark.parametrize("tile", [16, (64, 16), 128])
@pytest.mark.parametrize("length", [*LENGTHS, 300])
def test_a_table_of_exactly_the_length_is_never_read_past_its_end(
    length: int, tile: int | tuple[int, int]
) -> None:
    """B03. Mask creation rounded lengths up to whole blocks and read tables out of bounds."""
    q, k, v = tensors(length, length)
    keep, group = drawn(length).bool(), drawn(length, high=3)
    pairs, bias = drawn(length, length).bool(), drawn(length, high=5).float()
    i, j = index(length, length)
    for rule, seen in (
        (lambda b, h, q, kv: keep[kv] & (q >= kv), keep[j] & (i >= j)),
        (lambda b, h, q, kv: keep[q] & keep[kv], keep[i] & keep[j]),
        (lambda b, h, q, kv: group[q] == group[kv], group[i] == group[j]),
        (lambda b, h, q, kv: pairs[q, kv], pairs),
    ):
        got = fs.attention(q, k, v, rule=rule, score=lambda s, b, h, q, kv: s + bias[kv], tile=tile)
        close(got, dense(q, k, v, seen, lambda s: s + bias[None, :])[0])


def test_a_compiled_kernel_reads_a_table_of_exactly_the_length() -> None:
    """B03, in the fused kernel."""
    q, k, v = tensors(300, 300)
    keep = drawn(300).bool()
    i, j = index(300, 300)
    got = fs.attention(q, k, v, rule=lambda b, h, q, kv: keep[kv] & (q >= kv), backend="flex")
    close(got, dense(q, k, v, keep[j] & (i >= j))[0])


@pytest.mark.parametrize("q_len", [1, 7, 65])
def test_a_table_of_the_keys_serves_fewer_queries_at_their_positions(q_len: int) -> None:
    """B03. Queries of a decoding step read the table at their positions, not at their rows."""
    q, k, v = tensors(q_len, 100)
    ids = torch.arange(100) // 9
    i, j = index(q_len, 100, 100 - q_len)
    got = fs.attention(q, k, v, rule=Document(ids) & Causal())
    close(got, dense(q, k, v, (ids[i] == ids[j]) & (i >= j))[0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rule": Document(torch.zeros(63, dtype=torch.int64))}, "Document"),
        ({"rule": Document(torch.zeros(1, 64, dtype=torch.int64))}, "Document"),
        ({"rule": RightPadding(torch.tensor([64]))}, "RightPadding"),
        ({"rule": LeftPadding(torch.tensor([0]))}, "LeftPadding"),
        ({"rule": PrefixLM(torch.tensor([3]))}, "PrefixLM"),
        ({"rule": Causal() & RightPadding(torch.tensor([64]))}, "RightPadding"),
        ({"score": Alibi(torch.ones(1))}, "Alibi"),
        ({"score": HeadBias(torch.ones(1, 9))}, "HeadBias"),
        # Queries before the first key have negative positions: no table has an entry for them.
        ({"rule": Document(torch.zeros(64, dtype=torch.int64)), "q_offset": -5}, "Document"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_a_table_read_outside_its_length_is_an_error_that_names_the_rule(
    options: dict[str, Any], named: str
) -> None:
    """B03. Reading past a table, or before it, is refused before any kernel runs."""
    q, k, v = tensors(64, 64, batch=2)
    with pytest.raises(fs.FlexSparseError, match=named):
        fs.attention(q, k, v, **options)


# Positions


@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(5, 12), (130, 300), (1, 1), (1, 64), (65, 64), (12, 5), (64, 200), (1, 513)],
)
def test_causal_is_bottom_right_unless_an_offset_says_otherwise(q_len: int, kv_len: int) -> None:
    """B05. Top-left alignment surprised who decodes with a cache; here each is asked for by name."""
    q, k, v = tensors(q_len, kv_len)
    for options, offset in (
        ({}, kv_len - q_len),
        ({"q_offset": 0}, 0),
        ({"q_offset": 3}, 3),
        ({"q_offset": torch.tensor(2)}, 2),
        ({"q_offset": torch.tensor([4], dtype=torch.int32)}, 4),
    ):
        i, j = index(q_len, kv_len, offset)
        out, lse = dense(q, k, v, i >= j)
        got, got_lse = fs.attention(q, k, v, rule=Causal(), return_lse=True, tile=32, **options)
        close(got, out)
        close(got_lse, lse)


def test_more_queries_than_keys_leave_the_first_queries_empty() -> None:
    """B05. Bottom-right with q longer than kv: the rows before the first key are zero, not NaN."""
    q, k, v = (x.requires_grad_() for x in tensors(12, 5))
    out, lse = fs.attention(q, k, v, rule=Causal(), return_lse=True)
    assert bool((out[:, :, :7] == 0).all()) and bool((lse[:, :, :7] == -torch.inf).all())
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert bool((grads[0][:, :, :7] == 0).all())
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("pack", ["identity", "fold", "pack"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1), (12, 4)])
def test_batch_and_head_of_a_rule_are_logical_however_heads_are_laid(
    heads: tuple[int, int], pack: str
) -> None:
    """B08. A packing helper gave the rule the packed batch index, and window[b] read entry 0."""
    q, k, v = tensors(70, 90, batch=3, heads=heads)
    window, slope = torch.tensor([4, 200, 17]), torch.tensor([0.1, -0.3, 0.02])
    lean = torch.linspace(-0.2, 0.2, heads[0])
    i, j = index(70, 90, 20)
    seen = (i >= j) & (i - j < window[:, None, None, None])
    seen = seen & ((i + j + torch.arange(heads[0])[:, None, None]) % 3 > 0)
    got = fs.attention(
        q, k, v, pack=pack, tile=32,
        rule=lambda b, h, q, kv: (q >= kv) & (q - kv < window[b]) & ((q + kv + h) % 3 > 0),
        score=lambda s, b, h, q, kv: s + slope[b] * kv + lean[h] * q,
    )  # fmt: skip
    change = lambda s: s + slope[:, None, None, None] * j + lean[:, None, None] * i  # noqa: E731
    close(got, dense(q, k, v, seen, change)[0], atol=2e-5)


def test_a_compiled_kernel_gives_rules_their_logical_batch() -> None:
    """B08, in the fused kernel, with KV heads folded into the batch."""
    q, k, v = tensors(70, 90, batch=3, heads=(6, 2))
    window = torch.tensor([4, 200, 17])
    i, j = index(70, 90, 20)
    rule = fs.MaskRule.of(lambda b, h, q, kv: (q >= kv) & (q - kv < window[b] + h))
    seen = (i >= j) & (i - j < window[:, None, None, None] + torch.arange(6)[:, None, None])
    got = fs.attention(q, k, v, rule=rule, pack="fold", backend="flex")
    close(got, dense(q, k, v, seen)[0])


@pytest.mark.parametrize("lengths", [[70, 90, 140], [1, 63, 64, 65], [200], [1, 1, 1]])
def test_documents_packed_in_a_row_equal_each_document_alone(lengths: list[int]) -> None:
    """B08. A parameter of each document is reached through the document of the query."""
    parts = [tensors(n, n) for n in lengths]
    window = torch.tensor([4, 200, 17, 1])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rule = Document(ids) & (lambda b, h, q, kv: (q >= kv) & (q - kv < window[ids[q]]))
    packed = [torch.cat(x, 2) for x in zip(*parts, strict=True)]
    want = []
    for d, (q, k, v) in enumerate(parts):
        i, j = index(lengths[d], lengths[d])
        want.append(dense(q, k, v, (i >= j) & (i - j < window[d]))[0])
    close(fs.attention(*packed, rule=rule, tile=32), torch.cat(want, 2))


@pytest.mark.parametrize("start", [0, 1, 63, 64, 128, 255])
def test_a_shard_of_queries_is_those_rows_of_the_whole(start: int) -> None:
    """B68. A distance bias on a sequence shard: mask and bias must be shifted together."""
    q, k, v = tensors(256, 256, heads=(4, 2))
    slopes = torch.tensor([0.1, 0.5, 0.01, -0.2])
    i, j = index(256, 256)
    want, want_lse = dense(q, k, v, i >= j, lambda s: s + slopes[:, None, None] * (j - i))
    got, lse = fs.attention(
        q[:, :, start:], k, v, rule=Causal(), score=Alibi(slopes), q_offset=start, return_lse=True
    )
    close(got, want[:, :, start:], atol=2e-5)
    close(lse, want_lse[:, :, start:], atol=2e-5)


@pytest.mark.parametrize("cut", [1, 64, 100, 255])
def test_a_shard_of_keys_and_values_merges_to_the_whole(cut: int) -> None:
    """B68. Keys on another rank: positions count from the shard's first key, and merge joins them."""
    q, k, v = tensors(256, 256, heads=(4, 2))
    score = Alibi(torch.tensor([0.1, 0.5, 0.01, -0.2]))
    whole = fs.attention(q, k, v, rule=SlidingWindow(150), score=score, return_lse=True)
    parts = []
    for first, last in ((0, cut), (cut, 256)):
        shard = (q, k[:, :, first:last], v[:, :, first:last])
        options = {"rule": SlidingWindow(150), "score": score, "q_offset": -first}
        parts.append(fs.Partial(*fs.attention(*shard, return_lse=True, **options)))
    merged = fs.merge(parts)
    close(merged.out, whole[0], atol=2e-5)
    close(merged.lse, whole[1], atol=2e-5)


def test_a_compiled_shard_shifts_mask_and_bias_alike() -> None:
    """B68, in the fused kernel."""
    q, k, v = tensors(256, 256)
    i, j = index(256, 256)
    want = dense(q, k, v, i >= j, lambda s: s - 0.1 * (i - j))[0]
    score = Alibi(torch.tensor([0.1, 0.1]))
    got = fs.attention(
        q[:, :, 128:], k, v, rule=Causal(), score=score, q_offset=128, backend="flex"
    )
    close(got, want[:, :, 128:])


# Blocks


@pytest.mark.parametrize(
    "block", [16, 24, 64, (64, 128), (128, 64), (16, 200), (37, 53), 320, 1000]
)
def test_every_block_size_gives_one_answer(block: int | tuple[int, int]) -> None:
    """B27. Sizes other than 128, rectangular ones, and ones beyond the length."""
    q, k, v = (x.requires_grad_() for x in tensors(320, 320, heads=(4, 2)))
    i, j = index(320, 320)
    seen = (i >= j) & (i - j < 100)
    out = fs.attention(q, k, v, rule=SlidingWindow(100), tile=block)
    want = dense(q, k, v, seen)[0]
    close(out, want)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    for got, true in zip(
        torch.autograd.grad((out * weight).sum(), [q, k, v]),
        torch.autograd.grad((want * weight).sum(), [q, k, v]),
        strict=True,
    ):
        close(got, true, atol=2e-5)
    layout = fs.build_layout(
        rule=SlidingWindow(100), grid=fs.Grid(320, 320), heads=(4, 2), block_size=block
    )
    assert torch.equal(layout.dense(), seen.expand(1, 4, -1, -1))


@pytest.mark.parametrize("block", [(64, 128), 16])
def test_a_compiled_kernel_takes_blocks_that_are_not_128(block: int | tuple[int, int]) -> None:
    """B27, in the fused kernel."""
    q, k, v = tensors(320, 320)
    i, j = index(320, 320)
    got = fs.attention(q, k, v, rule=SlidingWindow(100), tile=block, backend="flex")
    close(got, dense(q, k, v, (i >= j) & (i - j < 100))[0])


@pytest.mark.parametrize("block", [0, -1, 1, 8, 15, (16, 8), (0, 128)])
def test_a_block_too_small_is_refused_with_the_smallest_that_works(block: Any) -> None:
    """B27. Size 8 used to pass construction and fail deep in code generation; 0 divided by zero."""
    q, k, v = tensors(64, 64)
    with pytest.raises(fs.FlexSparseError, match="at least 16"):
        fs.attention(q, k, v, tile=block)
    with pytest.raises(fs.FlexSparseError, match="at least 16"):
        fs.build_layout(grid=fs.Grid(64, 64), heads=(2, 2), block_size=block)


@pytest.mark.parametrize("block", [1.5, "128", True, (128,), (16, 16, 16), [None, 16]])
def test_a_block_that_is_no_size_is_refused(block: Any) -> None:
    """B27. A wrong kind is named as such."""
    q, k, v = tensors(64, 64)
    with pytest.raises(fs.FlexSparseError, match="size"):
        fs.attention(q, k, v, tile=block)


@pytest.mark.parametrize("block", [0, -1, 1.5, True])
def test_a_candidate_block_must_be_a_positive_int(block: Any) -> None:
    """B27. Block sizes of candidates are judged where the selection is made."""
    indices = torch.zeros(1, 1, 64, 1, dtype=torch.int64)
    for name in ("kv_block", "q_block"):
        with pytest.raises(fs.FlexSparseError, match=name):
            fs.Selection.from_indices(indices, kv_len=64, q_len=64, **{name: block})


@pytest.mark.parametrize(
    ("q_block", "kv_block"), [(1, 1), (8, 8), (3, 5), (16, 100), (64, 8), (70, 70)]
)
def test_candidate_blocks_of_any_size_stay_exact_inside_tiles(q_block: int, kv_block: int) -> None:
    """B27. Blocks finer or coarser than a tile, or dividing nothing, select their own pairs only."""
    q, k, v = tensors(70, 90)
    rows, candidates = math.ceil(70 / q_block), math.ceil(90 / kv_block)
    draw = torch.Generator().manual_seed(2)
    chosen = torch.rand(1, 2, rows, candidates, generator=draw) < 0.3
    indices = torch.where(chosen, torch.arange(candidates), -1)
    selection = fs.Selection.from_indices(
        indices, kv_len=90, q_len=70, q_block=q_block, kv_block=kv_block
    )
    seen = chosen.repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)[:, :, :70, :90]
    for tile in (16, 32, 128):
        close(fs.attention(q, k, v, select=selection, tile=tile), dense(q, k, v, seen)[0])


# Layouts that move, shrink and grow


@dataclass(frozen=True, eq=False)
class Shifted(fs.MaskRule):
    """Causal with an offset of its own for each sequence."""

    offset: Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + self.offset[b] >= kv_idx


def moving_layout(**options: Any) -> fs.Layout:
    selection = fs.Selection.from_indices(
        torch.tensor([[[[0], [1]]], [[[1], [-1]]]]), kv_len=64, q_len=64, q_block=32, kv_block=32
    )
    return fs.build_layout(
        rule=Shifted(torch.tensor([0, 5])), select=selection, grid=fs.Grid(64, 64, batch=2),
        heads=(2, 2), sanitize=True, **options,
    )  # fmt: skip


def test_moving_a_layout_moves_what_its_rule_captured() -> None:
    """B29. The lists moved and the captured tensor stayed behind, so the next call failed."""
    moved = moving_layout(fallback="self", empty="error").to("meta")
    held = [*moved.lists, *moved.tables]
    held += [x for x in (moved.seen_keys, moved.has_empty_row) if x is not None]
    assert moved.select is not None
    held.append(moved.select.indices)
    assert {x.device.type for x in held} == {"meta"}
    seen = moved.block_mask.mask_mod(*(torch.zeros(1, dtype=torch.int32, device="meta"),) * 4)
    assert seen.device.type == "meta"


def test_a_moved_layout_means_the_same() -> None:
    """B29. After the move: same rule, same pairs, same kind."""
    layout = moving_layout()
    moved = layout.to("cpu")
    assert type(moved) is type(layout)
    i, j = index(64, 64)
    chosen = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [0, 0]]], dtype=torch.bool)
    chosen = chosen.repeat_interleave(32, 1).repeat_interleave(32, 2)
    seen = chosen & (i + torch.tensor([0, 5])[:, None, None] >= j)
    assert torch.equal(moved.dense(), seen[:, None].expand(-1, 2, -1, -1))
    q, k, v = tensors(64, 64, batch=2)
    rule = Shifted(torch.tensor([0, 5]))
    plan = fs.make_plan(
        q, k, v, rule=rule, select=layout.select, sanitize=True, backend="tiles", tile=128
    )
    close(plan.run(q, k, v, moved).out, dense(q, k, v, seen[:, None])[0])


@pytest.mark.gpu
def test_a_layout_built_on_the_cpu_runs_on_the_gpu(device: torch.device) -> None:
    """B29. Built ahead on the host, moved, and run."""
    q, k, v = (x.to(device) for x in tensors(64, 64, batch=2))
    layout = moving_layout().to(device)
    rule = Shifted(torch.tensor([0, 5], device=device))
    assert layout.select is not None
    plan = fs.make_plan(
        q, k, v, rule=rule, select=layout.select, sanitize=True,
        backend="flex", pack="identity", tile=layout.block_size,
    )  # fmt: skip
    want = dense(q, k, v, layout.dense())[0]
    close(plan.run(q, k, v, layout).out, want, atol=2e-3)


def test_bind_moves_numbers_and_tensors_and_leaves_the_rule_alone() -> None:
    """B29. The copy for another device captures nothing of this one."""
    rule = Shifted(torch.tensor([1, 2])) & SlidingWindow(5)
    bound = rule.bind("meta")
    one = torch.zeros(1, dtype=torch.int64, device="meta")
    assert bound(one, one, one, one).device.type == "meta"
    here = torch.zeros(1, dtype=torch.int64)
    assert rule(here, here, here, here).device.type == "cpu"


@pytest.mark.parametrize("length", [1, 63, 64, 65, 384, 600])
def test_a_layout_for_a_shorter_length_is_the_one_built_for_it(length: int) -> None:
    """B31. Cropping counted slots past the valid ones: full blocks 0 and 3 of 640 keys, cut to 384."""
    q, k, v = tensors(128, 640)
    chosen = torch.tensor([[[[0, 3, -1, -1, -1]]]])
    whole = fs.Selection.from_indices(chosen, kv_len=640, q_len=128, q_block=128, kv_block=128)
    near = fs.Selection.from_indices(
        chosen, kv_len=length, q_len=128, q_block=128, kv_block=128, out_of_range="drop"
    )
    j = torch.arange(640)[None, :]
    seen = ((j < 128) | ((j >= 384) & (j < 512))).expand(128, -1)
    close(fs.attention(q, k, v, select=whole), dense(q, k, v, seen)[0])
    short = (q, k[:, :, :length], v[:, :, :length])
    plan = fs.make_plan(*short, select=near)
    close(plan.run(*short).out, dense(*short, seen[:, :length])[0])
    assert plan.first is not None
    listed = sum(x for x in plan.first.tile_maps()).flatten().tolist()
    assert listed == [c in (0, 3) for c in range(math.ceil(length / 128))]
    visible = fs.attention(q, k, v, select=whole, rule=lambda b, h, q, kv: kv < length)
    close(visible, plan.run(*short).out)


def test_unused_slots_of_every_list_are_harmless() -> None:
    """B31. Slots past the count hold 0: who reads one finds a tile that exists."""
    layout = fs.build_layout(
        rule=SlidingWindow(70), grid=fs.Grid(300, 640), heads=(2, 2), block_size=64
    )
    for counts, slots in zip(layout.lists[::2], layout.lists[1::2], strict=True):
        used = torch.arange(slots.shape[-1]) < counts[..., None]
        assert bool((slots[~used] == 0).all())
        rising = slots[..., 1:] > slots[..., :-1]
        assert bool(rising[used[..., 1:]].all())


def test_a_plan_refuses_tensors_of_another_length() -> None:
    """B31. A layout for 640 keys is not silently used for 384."""
    q, k, v = tensors(128, 640)
    plan = fs.make_plan(q, k, v, rule=Causal())
    for case in ((q, k[:, :, :384], v[:, :, :384]), (q[:, :, :64], k, v)):
        with pytest.raises(fs.FlexSparseError, match=r"\d"):
            plan.run(*case)
    other = fs.make_plan(q, k[:, :, :384], v[:, :, :384], rule=Causal(), q_offset=512)
    with pytest.raises(fs.FlexSparseError, match="does not belong"):
        plan.run(q, k, v, other.first)


@pytest.mark.parametrize("batch", [4, 3, 6, 5, 1])
@pytest.mark.parametrize("length", [256, 300, 200, 65])
def test_batch_and_length_may_change_under_a_rule_by_sequence(batch: int, length: int) -> None:
    """B36. Rules that read lens[b] recompiled without end, or failed on dynamic shapes."""
    lens = torch.tensor([length, length // 2, 1, 0, length // 3 + 1, 7])[:batch]
    q, k, v = tensors(length, length, batch=batch, dim=16)
    i, j = index(length, length)
    seen = (j < lens[:, None, None, None]) & (i >= j)
    got = fs.attention(q, k, v, rule=lambda b, h, q, kv: (kv < lens[b]) & (q >= kv))
    close(got, dense(q, k, v, seen)[0])


def test_new_parameters_do_not_compile_anew() -> None:
    """B36. Other lengths, windows and ids through the same kind of rule share one kernel."""
    q, k, v = tensors(200, 200, batch=3)
    i, j = index(200, 200)
    counted = []
    for lens, window in (([200, 7, 0], 5), ([1, 64, 65], 64), ([199, 200, 3], 300)):
        rule = RightPadding(torch.tensor(lens)) & SlidingWindow(window)
        n = torch.tensor(lens)[:, None, None, None]
        seen = (i < n) & (j < n) & (i >= j) & (i - j < window)
        close(fs.attention(q, k, v, rule=rule, backend="flex"), dense(q, k, v, seen)[0])
        counted.append(int(compiles))
    assert counted[0] == counted[1] == counted[2]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, list | tuple) else [result]:
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def largest(build: Callable[[], object]) -> int:
    with Largest() as seen:
        build()
    return seen.bytes


@pytest.mark.parametrize(
    "rule", [Causal(), SlidingWindow(500), Causal() & AttentionSink(4)], ids=str
)
def test_building_a_layout_never_holds_the_whole_mask(rule: fs.MaskRule) -> None:
    """B37. A mask of S times S pairs was made first; the layout itself needs a few kilobytes."""

    def build(length: int) -> Callable[[], object]:
        grid = fs.Grid(length, length)
        return lambda: fs.build_layout(rule=rule, grid=grid, heads=(2, 2))

    small, large = largest(build(2048)), largest(build(8192))
    assert large < 8192 * 8192 // 2
    assert large <= 4 * max(small, 2**20)


def test_building_a_layout_from_candidates_never_holds_the_whole_mask() -> None:
    """B37. A selection of blocks costs memory by its blocks."""
    indices = torch.arange(8192 // 64)[None, None, :, None]
    selection = fs.Selection.from_indices(indices, kv_len=8192, q_len=8192, q_block=64, kv_block=64)
    grid = fs.Grid(8192, 8192)
    used = largest(
        lambda: fs.build_layout(rule=Causal(), select=selection, grid=grid, heads=(2, 2))
    )
    assert used < 8192 * 8192 // 2


# Scores and padding


@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_softcap_bends_the_score_and_masking_comes_after(length: int, cap: float) -> None:
    """B49. A wrong formula, and a cap after the mask, which lets the future leak through."""
    q, k, v = (3 * x for x in tensors(length, length))
    i, j = index(length, length)
    want = dense(q, k, v, i >= j, lambda s: cap * torch.tanh(s / cap))[0]
    close(fs.attention(q, k, v, rule=Causal(), score=Softcap(cap)), want, atol=5e-5)
    capped = fs.attention(
        q, k, v, rule=Causal(), score=lambda s, b, h, q, kv: cap * torch.tanh(s / cap)
    )
    close(capped, want, atol=5e-5)


def test_the_future_does_not_leak_through_a_score() -> None:
    """B49. However keys after a query change, the query's output keeps its bits."""
    q, k, v = tensors(64, 64)
    score = Alibi(torch.tensor([0.5, 0.1])) >> Softcap(1.0)
    before = fs.attention(q, k, v, rule=Causal(), score=score)
    k[:, :, 40:], v[:, :, 40:] = k[:, :, 40:] * 50, v[:, :, 40:] - 9
    after = fs.attention(q, k, v, rule=Causal(), score=score)
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.equal(before[:, :, 40:], after[:, :, 40:])


def test_a_compiled_softcap_is_masked_after() -> None:
    """B49, in the fused kernel."""
    q, k, v = (3 * x for x in tensors(200, 200))
    i, j = index(200, 200)
    want = dense(q, k, v, i >= j, torch.tanh)[0]
    close(fs.attention(q, k, v, rule=Causal(), score=Softcap(1.0), backend="flex"), want)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_lm_holds_at_its_edges(length: int) -> None:
    """B54. Prefixes of 0, 1, some and all keys: the first two are causal, the last is full."""
    prefixes = [0, 1, length // 2, length]
    q, k, v = tensors(length, length, batch=4)
    i, j = index(length, length)
    seen = (j < torch.tensor(prefixes)[:, None, None, None]) | (i >= j)
    assert torch.equal(seen[0, 0], i >= j) and torch.equal(seen[1, 0], i >= j)
    assert bool(seen[3].all())
    for dtype in (torch.int32, torch.int64):
        got = fs.attention(q, k, v, rule=PrefixLM(torch.tensor(prefixes, dtype=dtype)))
        close(got, dense(q, k, v, seen)[0])
    for b, prefix in enumerate(prefixes):
        one = [x[b : b + 1] for x in (q, k, v)]
        close(fs.attention(*one, rule=PrefixLM(prefix)), dense(*one, seen[b])[0])
    causal = fs.attention(q, k, v, rule=Causal())
    assert torch.equal(fs.attention(q, k, v, rule=PrefixLM(0)), causal)
    assert torch.equal(fs.attention(q, k, v, rule=PrefixLM(1)), causal)
    close(fs.attention(q, k, v, rule=PrefixLM(length)), fs.attention(q, k, v))


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("real", [[100, 90], [1, 1], [64, 64], [63, 65]])
def test_padding_behind_packed_documents_takes_no_part(real: list[int], tile: int) -> None:
    """B69. Pads attended to each other; here a pad row is 0 with lse -inf, and no gradient."""
    q, k, v = (x.requires_grad_() for x in tensors(256, 256))
    ids = torch.full((256,), -1)
    ids[: sum(real)] = torch.repeat_interleave(torch.arange(2), torch.tensor(real))
    i, j = index(256, 256)
    seen = (ids[i] == ids[j]) & (ids[i] >= 0) & (i >= j)
    out, lse = fs.attention(q, k, v, rule=Document(ids) & Causal(), tile=tile, return_lse=True)
    want, want_lse = dense(q, k, v, seen)
    close(out, want)
    close(lse, want_lse)
    pads = slice(sum(real), None)
    assert bool((out[:, :, pads] == 0).all()) and bool((lse[:, :, pads] == -torch.inf).all())
    for grad in torch.autograd.grad(out.square().sum(), [q, k, v]):
        assert bool((grad[:, :, pads] == 0).all())
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_batch_leaves_real_rows_alone(side: str) -> None:
    """B69. Each sequence of a padded batch equals that sequence alone."""
    lengths = [65, 64, 1, 0]
    q, k, v = tensors(65, 65, batch=4, heads=(4, 2))
    n = torch.tensor(lengths)
    rule = (LeftPadding(65 - n) if side == "left" else RightPadding(n)) & Causal()
    out, lse = fs.attention(q, k, v, rule=rule, return_lse=True)
    for b, length in enumerate(lengths):
        real = slice(65 - length, 65) if side == "left" else slice(0, length)
        alone = [x[b : b + 1, :, real] for x in (q, k, v)]
        if length:
            i, j = index(length, length)
            close(out[b : b + 1, :, real], dense(*alone, i >= j)[0])
        rest = torch.ones(65, dtype=torch.bool)
        rest[real] = False
        assert bool((out[b, :, rest] == 0).all()) and bool((lse[b, :, rest] == -torch.inf).all())


# Batches that do not fit


@pytest.mark.parametrize("batch", [1, 2, 3, 6, 8])
def test_a_batch_other_than_the_selections_is_refused(batch: int) -> None:
    """B52. A mask for 4 sequences crashed the process, or mapped rows onto each other in silence."""
    q, k, v = tensors(64, 64, batch=batch)
    indices = torch.zeros(4, 1, 1, 1, dtype=torch.int64)
    four = fs.Selection.from_indices(indices, kv_len=64, q_len=64, q_block=64, kv_block=64)
    with pytest.raises(fs.FlexSparseError, match=rf"batch 4 .* {batch}"):
        fs.attention(q, k, v, select=four)
    with pytest.raises(fs.FlexSparseError, match=rf"batch 4 .* {batch}"):
        grid = fs.Grid(64, 64, batch=batch)
        fs.build_layout(select=four, grid=grid, heads=(2, 2))


@pytest.mark.parametrize("batch", [1, 2, 3, 6, 8])
def test_a_plan_and_a_layout_of_another_batch_are_refused(batch: int) -> None:
    """B52. Reuse across batches is an error that says both numbers, on every path."""
    rule = Causal()
    four = tensors(64, 64, batch=4)
    other = tensors(64, 64, batch=batch)
    plan = fs.make_plan(*four, rule=rule)
    with pytest.raises(fs.FlexSparseError, match=r"\[4, .*\[" + str(batch)):
        plan.run(*other)
    with pytest.raises(fs.FlexSparseError, match="batch=4"):
        fs.make_plan(*other, rule=rule).run(*other, plan.first)
    offset = torch.tensor([0, 1, 2, 3])
    if batch != 1:
        with pytest.raises(fs.FlexSparseError, match="q_offset"):
            fs.attention(*other, rule=rule, q_offset=offset)


def test_a_smaller_batch_uses_the_first_entries_of_a_table() -> None:
    """B52. The last, smaller batch of an epoch, under a rule that holds the lengths of more."""
    lens = torch.tensor([200, 3, 64, 65])
    q, k, v = tensors(200, 200, batch=2)
    j = torch.arange(200)
    got = fs.attention(q, k, v, rule=lambda b, h, q, kv: kv < lens[b])
    close(got, dense(q, k, v, j < lens[:2, None, None, None])[0])


# Rules that cannot become a kernel


N = torch.tensor([3, 4])
TABLE = torch.ones(8, 8, dtype=torch.bool)
STEPS = [1, 2, 3]


def branch(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    if i >= j:
        return i >= j
    return i < j


def in_place(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    allowed = i >= j
    allowed &= j > 2
    return allowed


def whole_table(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return TABLE


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (branch, "torch.where"),
    "ternary": (lambda b, h, i, j: (i >= j) if j > 2 else (i < j), "torch.where"),
    "item": (lambda b, h, i, j: j < N[b].item(), "captured tensor"),
    "set": (lambda b, h, i, j: j in (1, 2, 3), "&"),
    "chained": (lambda b, h, i, j: 3 < j < 9, r"\(a <= x\) & \(x < b\)"),
    "and": (lambda b, h, i, j: i >= j and j > 2, "&"),
    "or": (lambda b, h, i, j: i >= j or j > 2, r"\|"),
    "not": (lambda b, h, i, j: not (i >= j), "~"),
    "max": (lambda b, h, i, j: max(i, j) < 5, "torch.maximum"),
    "int": (lambda b, h, i, j: int(j) < 5, "captured tensor"),
    "float": (lambda b, h, i, j: float(j) < 5, "captured tensor"),
    "list": (lambda b, h, i, j: STEPS[j] < 5, "captured tensor"),
    "range": (lambda b, h, i, j: j in range(5), "&"),
    "tolist": (lambda b, h, i, j: j < N.tolist()[0], "captured tensor"),
    "numpy": (lambda b, h, i, j: j.numpy() < 5, "captured tensor"),
    "in-place": (in_place, "m = m & other"),
    "any": (lambda b, h, i, j: (TABLE[i] == j).any(), "index every axis"),
    "isin": (lambda b, h, i, j: torch.isin(j, N), "precompute"),
    "slice": (lambda b, h, i, j: TABLE[i, :4].sum() > j, "index every axis"),
    "sum": (lambda b, h, i, j: N.sum() > j, "precompute"),
    "random": (lambda b, h, i, j: torch.rand(()) < 0.5, "draw a tensor once"),
    "whole-table": (whole_table, "index every axis"),
    "typo": (lambda b, h, i, j: i >= undefined, "undefined"),  # noqa: F821
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_cannot_be_fused_names_itself_its_line_and_the_rewrite(name: str) -> None:
    """B60. Errors of vmap named neither the rule nor its line, and pointed to the wrong place."""
    mod, advice = REFUSED[name]
    lines, first = inspect.getsourcelines(mod)
    with pytest.raises(fs.FlexSparseError, match=advice) as caught:
        fs.attention(*tensors(8, 8), rule=mod)
    message = str(caught.value)
    assert mod.__name__ in message
    at = [int(line) for line in re.findall(r"test_cases_masks\.py:(\d+)", message)]
    assert first <= at[-1] < first + len(lines), message
    assert "<string>" not in message


@pytest.mark.parametrize(
    ("mod", "advice"),
    [
        (lambda b, h, i, j: True, "bool tensor.*True"),
        (lambda b, h, i, j: i - j, "compare"),
        (lambda b, h, i, j: (i - j) * 0.5, "score"),
        (lambda b, h, i, j: None, "bool tensor.*None"),
        (lambda b, h, i, j: [i >= j], "bool tensor"),
    ],
)
def test_a_rule_that_returns_no_bool_tensor_is_refused(
    mod: Callable[..., Any], advice: str
) -> None:
    """B60. What was returned, and what was expected."""
    with pytest.raises(fs.FlexSparseError, match=advice):
        fs.attention(*tensors(8, 8), rule=mod)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"rule": lambda b, h, i: i >= 0}, "4 arguments"),
        ({"rule": lambda i, j: i >= j}, "4 arguments"),
        ({"rule": lambda s, b, h, i, j: s}, "score="),
        ({"score": lambda b, h, i, j: i >= j}, "rule="),
        ({"score": Causal()}, "rule="),
        ({"rule": Softcap(1.0)}, "score"),
        ({"rule": TABLE}, "capture it"),
        ({"rule": Causal}, r"Causal\(\.\.\.\)"),
        ({"rule": 3}, "rule or a function"),
        ({"score": TABLE}, "capture it"),
        ({"select": TABLE}, "from_indices"),
    ],
)
def test_what_stands_in_the_wrong_slot_is_told_where_it_belongs(
    options: dict[str, Any], advice: str
) -> None:
    """B60. A score_mod as rule, a mask as tensor, a class instead of a rule."""
    with pytest.raises(fs.FlexSparseError, match=advice):
        fs.attention(*tensors(8, 8), **options)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, i, j: s if i >= j else s * 2,
        lambda s, b, h, i, j: s * N[b].item(),
        lambda s, b, h, i, j: s.add_(1),
        lambda s, b, h, i, j: s.softmax(-1),
        lambda s, b, h, i, j: i >= j,
        lambda s, b, h, i, j: 0.0,
        lambda s, b, h, i, j: s + torch.rand(()),
    ],
)
def test_a_score_that_cannot_be_fused_is_refused(mod: Callable[..., Any]) -> None:
    """B60. The same for scores."""
    with pytest.raises(fs.FlexSparseError, match="score <lambda>"):
        fs.attention(*tensors(8, 8), score=mod)


def test_a_rule_class_is_refused_when_it_is_made() -> None:
    """B60. Not at the first call, deep in a training loop."""

    @dataclass(frozen=True, eq=False)
    class Branching(fs.MaskRule):
        size: int

        def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            if kv_idx < self.size:
                return q_idx >= kv_idx
            return q_idx < kv_idx

    with pytest.raises(fs.FlexSparseError, match=r"Branching.*test_cases_masks\.py.*torch\.where"):
        Branching(3)


def test_the_rewrites_that_errors_suggest_are_exact() -> None:
    """B60. Evaluated pair by pair, the refused rules have a value: the rewritten ones give it."""
    q, k, v = tensors(40, 40, batch=2)
    i, j = index(40, 40)
    n = N[:, None, None, None]
    for rule, seen in (
        (
            lambda b, h, q, kv: torch.where(kv > 2, q >= kv, q < kv),
            torch.where(j > 2, i >= j, i < j),
        ),
        (lambda b, h, q, kv: kv < N[b], j < n),
        (lambda b, h, q, kv: (kv == 1) | (kv == 2) | (kv == 3), (j >= 1) & (j <= 3)),
        (lambda b, h, q, kv: (kv > 3) & (kv < 9), (j > 3) & (j < 9)),
        (lambda b, h, q, kv: torch.maximum(q, kv) < 5, (i < 5) & (j < 5)),
    ):
        close(fs.attention(q, k, v, rule=rule), dense(q, k, v, seen)[0])
