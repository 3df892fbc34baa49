"""What users met at run time elsewhere, held as promises: decoding, gradients, precision, compilers."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import close, dense
from torch import Tensor

import flexsparse as fs
from flexsparse.device import compiles
from flexsparse.masks import Alibi, Causal, HeadBias, SlidingWindow, Softcap
from flexsparse.selectors import Quest


def tensors(
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
    dim: int = 32,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(q_len * 1000 + kv_len + dim)
    shapes = [(batch, heads[0], q_len, dim), (batch, heads[1], kv_len, dim)]
    shapes.append((batch, heads[1], kv_len, dim if v_dim is None else v_dim))
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def causal(q_len: int, kv_len: int) -> Tensor:
    return torch.arange(kv_len)[None, :] <= torch.arange(kv_len - q_len, kv_len)[:, None]


def weight_like(x: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=draw).to(x.device, x.dtype)


def matches(
    inputs: list[Tensor],
    seen: Tensor,
    *,
    change: Callable[[Tensor], Tensor] | None = None,
    learned: tuple[Tensor, ...] = (),
    **options: Any,
) -> None:
    """out, lse, and the gradients of q, k, v and learned tensors are those of the dense formula."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = fs.attention(*leaves, return_lse=True, **options)
    want, want_lse = dense(*leaves, seen, change)
    close(out, want, atol=1e-5)
    close(lse, want_lse, atol=1e-5)
    wanted = [*leaves, *learned]
    got = torch.autograd.grad((out * weight_like(out)).sum(), wanted)
    true = torch.autograd.grad((want * weight_like(out)).sum(), wanted)
    for have, expected in zip(got, true, strict=True):
        close(have, expected, atol=2e-5 * max(1.0, float(expected.abs().max())))


@pytest.fixture(params=[torch.enable_grad, torch.no_grad, torch.inference_mode])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whichever way a model is served."""
    with request.param():
        yield


# Groups and head dims


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 1), (3, 1), (10, 2), (12, 2), (7, 1), (12, 1), (9, 3)]
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 600), (2, 65), (64, 64), (65, 200), (1, 1)])
def test_any_number_of_query_heads_shares_a_kv_head(
    q_len: int, kv_len: int, heads: tuple[int, int]
) -> None:
    """B09. Decoding demanded a group that is a power of two: 12 heads over 2 failed."""
    inputs = tensors(q_len, kv_len, heads=heads)
    j = torch.arange(kv_len)
    matches(inputs, torch.ones(q_len, kv_len, dtype=torch.bool))
    limited = (j < kv_len * 3 // 4).expand(q_len, -1)
    matches(inputs, limited, rule=lambda b, h, q, kv: kv < kv_len * 3 // 4)
    indices = torch.arange(0, math.ceil(kv_len / 16), 2).expand(1, heads[1], q_len, -1)
    selection = fs.Selection.from_indices(indices, kv_len=kv_len, q_len=q_len, kv_block=16)
    seen = (j // 16 % 2 == 0) & causal(q_len, kv_len)
    for pack in ("identity", "fold", "pack"):
        matches(inputs, seen, rule=Causal(), select=selection, pack=pack)


@pytest.mark.parametrize("keys", [450, 600, 1])
def test_a_compiled_decoding_step_takes_a_group_of_six(keys: int) -> None:
    """B09, in the fused kernel; the three lengths are one kernel."""
    inputs = tensors(1, 600, heads=(12, 2))
    got = fs.attention(*inputs, rule=lambda b, h, q, kv: kv < keys, backend="flex")
    close(got, dense(*inputs, torch.arange(600) < keys)[0])


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    """B09. 7 query heads over 2 KV heads mean nothing."""
    with pytest.raises(fs.FlexSparseError, match="7 query heads.*2 KV heads"):
        fs.attention(*tensors(4, 4, heads=(7, 2)))


@pytest.mark.parametrize(
    "dims", [(31, 31), (96, 96), (1, 1), (8, 8), (17, 5), (80, 128), (64, 31), (256, 16)]
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(130, 130), (1, 600), (5, 65)])
def test_head_dims_need_not_be_powers_of_two(
    q_len: int, kv_len: int, dims: tuple[int, int]
) -> None:
    """B65. Odd dims were refused, and 96 failed in decoding alone; V may be of another dim than K."""
    inputs = tensors(q_len, kv_len, dim=dims[0], v_dim=dims[1])
    matches(inputs, causal(q_len, kv_len), rule=Causal())


@pytest.mark.parametrize(("q_len", "kv_len"), [(130, 130), (1, 600)])
def test_a_compiled_kernel_takes_an_odd_head_dim(q_len: int, kv_len: int) -> None:
    """B65, in the fused kernel: prefill and decoding alike."""
    inputs = tensors(q_len, kv_len, dim=31)
    got = fs.attention(*inputs, rule=Causal(), backend="flex")
    close(got, dense(*inputs, causal(q_len, kv_len))[0])


# A cache that fills


POSITIONS = [100, 101, 127, 128, 161, 511]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("how", ["rule", "offset", "both"])
def test_a_position_advanced_in_place_is_followed(how: str, dtype: torch.dtype, mode: None) -> None:
    """B33. A tensor that counts filled slots moved into the next block, and keys were dropped."""
    q, k, v = tensors(1, 512, batch=2)
    position = torch.tensor([POSITIONS[0]] * 2, dtype=dtype)
    options: dict[str, Any] = {"rule": Causal(), "q_offset": position}
    if how == "rule":
        options = {"rule": fs.MaskRule.of(lambda b, h, q, kv: kv <= position[b])}
    if how == "both":
        options["rule"] = Causal() & (lambda b, h, q, kv: kv <= position[b])
    for at in POSITIONS:
        position.fill_(at)
        position[1] -= 50
        filled = torch.arange(512) <= position[:, None, None, None]
        close(fs.attention(q, k, v, **options), dense(q, k, v, filled)[0])


def test_a_position_held_by_an_object_is_followed(mode: None) -> None:
    """B33. The position lives in a cache object, as a number or as a tensor that is replaced."""
    q, k, v = tensors(1, 512)

    class Cache:
        def __init__(self) -> None:
            self.filled: Any = 0

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv <= self.filled

    cache, plain = Cache(), SimpleNamespace(filled=0)
    rules = [cache, fs.MaskRule.of(cache), lambda b, h, q, kv: kv <= plain.filled]
    for at in POSITIONS:
        for value in (at, torch.tensor(at)):
            cache.filled = plain.filled = value
            want = dense(q, k, v, torch.arange(512) <= at)[0]
            for rule in rules:
                close(fs.attention(q, k, v, rule=rule), want)


HELD = SimpleNamespace(filled=torch.tensor(0), window=0)


def test_a_position_held_by_a_global_object_is_followed(mode: None) -> None:
    """B33. In a script, the cache that a rule reads is a global."""
    q, k, v = tensors(1, 512)
    HELD.filled = torch.tensor(0)

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= HELD.filled) & (HELD.filled - kv < HELD.window)

    for at in POSITIONS:
        HELD.filled.fill_(at)
        HELD.window = at // 2
        j = torch.arange(512)
        want = dense(q, k, v, (j <= at) & (at - j < at // 2))[0]
        # Twice: the second call may use what the first decided.
        for _ in range(2):
            close(fs.attention(q, k, v, rule=rule), want)


def test_candidates_changed_in_place_are_followed(mode: None) -> None:
    """B33. A selection whose indices are written anew at each step."""
    q, k, v = tensors(1, 512)
    indices = torch.zeros(1, 1, 1, 4, dtype=torch.int64)
    selection = fs.Selection.from_indices(indices, kv_len=512, q_len=1, kv_block=64)
    for step in range(4):
        selection.indices.copy_(torch.tensor([0, 2 + step, -1, -1])[: selection.indices.shape[-1]])
        j = torch.arange(512) // 64
        want = dense(q, k, v, (j == 0) | (j == 2 + step))[0]
        close(fs.attention(q, k, v, select=selection), want)


def test_a_plan_makes_the_layout_of_the_present_position(mode: None) -> None:
    """B33. plan.layout reads captured tensors and offsets as they are now."""
    q, k, v = tensors(1, 512)
    position = torch.tensor(100)
    plan = fs.make_plan(q, k, v, rule=Causal(), q_offset=position)
    for at in POSITIONS:
        position.fill_(at)
        want = dense(q, k, v, torch.arange(512) <= at)[0]
        close(plan.run(q, k, v, plan.layout()).out, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_plan_never_drops_keys_because_its_layout_is_old(dtype: torch.dtype, mode: None) -> None:
    """B33. The plan's own layout after the position moved: followed or refused, never silently wrong."""
    q, k, v = tensors(1, 512)
    position = torch.tensor(100, dtype=dtype)
    plan = fs.make_plan(q, k, v, rule=fs.MaskRule.of(lambda b, h, q, kv: kv <= position))
    for at in POSITIONS:
        position.fill_(at)
        with contextlib.suppress(fs.FlexSparseError):
            close(plan.run(q, k, v).out, dense(q, k, v, torch.arange(512) <= at)[0])


def test_a_compiled_decoding_step_follows_its_position() -> None:
    """B33, in the fused kernel: one kernel for all positions, across block borders."""
    q, k, v = tensors(1, 512)
    position = torch.tensor(100)
    counted = []
    for at in POSITIONS:
        position.fill_(at)
        got = fs.attention(q, k, v, rule=Causal(), q_offset=position, backend="flex")
        close(got, dense(q, k, v, torch.arange(512) <= at)[0])
        counted.append(int(compiles))
    assert len(set(counted)) == 1


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200])
def test_decoding_token_by_token_is_one_prefill(length: int) -> None:
    """B33. Each step over the filled part of a cache equals its row of the whole."""
    q, k, v = tensors(length, length)
    whole = fs.attention(q, k, v, rule=SlidingWindow(50))
    buffer_k, buffer_v = (torch.full((1, 2, 256, 32), 1e9) for _ in range(2))
    buffer_k[:, :, :length], buffer_v[:, :, :length] = k, v
    for step in {0, 1, length // 2, length - 2, length - 1} & set(range(length)):
        row = q[:, :, step : step + 1]
        got = fs.attention(row, buffer_k, buffer_v, rule=SlidingWindow(50), q_offset=step)
        close(got, whole[:, :, step : step + 1])


def test_the_same_call_again_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B36. A plan is made once for a rule object and shapes, whatever happens in between."""
    q, k, v = tensors(4, 200)
    made = []
    door = sys.modules["flexsparse.attention"]
    make = door.make_plan  # type: ignore[attr-defined]
    monkeypatch.setattr(door, "make_plan", lambda *a, **o: made.append(0) or make(*a, **o))
    rule, selector = Causal(), Quest(block=16, keep=2, q_block=4)
    clutter = []
    for _ in range(6):
        fs.attention(q, k, v, rule=rule, tile=(32, 16))
        clutter.append({"kept": [{} for _ in range(50)]})
    assert len(made) == 1
    for _ in range(6):
        fs.attention(q, k, v, rule=rule, select=selector)
        clutter.append({"kept": [{} for _ in range(50)]})
    assert len(made) == 2
    del clutter
    gc.collect()


# Gradients


@pytest.mark.parametrize("grads_of", ["bias", "all"])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 96, 200])
def test_a_table_by_relative_position_is_learned(length: int, grads_of: str) -> None:
    """B39. Captured tensors that need gradients were refused, then got wrong sizes when compiled."""
    draw = torch.Generator().manual_seed(2)
    bias = torch.randn(2 * length, generator=draw).requires_grad_()
    q, k, v = tensors(length, length)
    at = torch.arange(length)
    behind = at[:, None] - at[None, :]

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + bias[q - kv + length]

    def change(s: Tensor) -> Tensor:
        return s + bias.double()[behind + length]

    if grads_of == "all":
        matches(
            [q, k, v],
            causal(length, length),
            rule=Causal(),
            score=score,
            change=change,
            learned=(bias,),
        )
        return
    out = fs.attention(q, k, v, rule=Causal(), score=score, tile=32)
    got = torch.autograd.grad((out * weight_like(out)).sum(), bias)[0]
    want = dense(q, k, v, causal(length, length), change)[0]
    close(got, torch.autograd.grad((want * weight_like(out)).sum(), bias)[0], atol=2e-5)


@pytest.mark.parametrize("pack", ["identity", "fold", "pack"])
def test_learned_tensors_of_any_shape_get_their_gradient(pack: str) -> None:
    """B39. A number, a value by head, by batch, by pair; one read twice; one also read by another."""
    draw = torch.Generator().manual_seed(4)
    length = 40
    number = torch.tensor(0.7, requires_grad=True)
    by_head = torch.randn(4, generator=draw).requires_grad_()
    by_batch = torch.randn(2, 3, generator=draw).requires_grad_()
    pairs = torch.randn(4, length, length, generator=draw).requires_grad_()
    double = torch.randn(4, generator=draw, dtype=torch.float64).requires_grad_()
    i = torch.arange(length)[:, None]
    j = torch.arange(length)[None, :]

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        s = s * number + by_head[h] * (q - kv) * 0.1 - by_head[h] ** 2
        return s + by_batch[b, kv % 3] + pairs[h, q, kv] + double[h] * kv * 0.01

    def change(s: Tensor) -> Tensor:
        heads = by_head.double()[:, None, None]
        s = s * number.double() + heads * (i - j) * 0.1 - heads**2
        s = (
            s
            + by_batch.double()[:, None, None].expand(2, 4, length, 3)[
                ..., torch.arange(length) % 3
            ]
        )
        return s + pairs.double() + double[:, None, None] * j * 0.01

    indices = torch.tensor([[[[0], [1], [2]]] * 2])
    selection = fs.Selection.from_indices(
        indices, kv_len=length, q_len=length, q_block=16, kv_block=16
    )
    seen = (i // 16 == j // 16) & (i >= j)
    learned = (number, by_head, by_batch, pairs, double)
    matches(
        tensors(length, length, batch=2, heads=(4, 2)), seen, rule=Causal(), select=selection,
        score=score, change=change, learned=learned, tile=16, pack=pack,
    )  # fmt: skip


def test_a_bias_is_learned_in_low_precision_too() -> None:
    """B39. bf16 inputs with an fp32 table: the gradient arrives in the table's own precision."""
    q, k, v = tensors(64, 64, dtype=torch.bfloat16)
    bias = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = fs.attention(q, k, v, rule=Causal(), score=HeadBias(bias))
    got = torch.autograd.grad((out * weight_like(out)).sum(), bias)[0]
    behind = (torch.arange(64)[:, None] - torch.arange(64)[None, :]).clip(0, 8)
    want = dense(q, k, v, causal(64, 64), lambda s: s + bias.double()[:, behind])[0]
    true = torch.autograd.grad((want * weight_like(out)).sum(), bias)[0]
    assert got.dtype == torch.float32
    close(got, true, atol=2e-2 * float(true.abs().max()))


def causal_as_blocks(length: int) -> fs.Selection:
    """Causal by block lists: full tiles below the diagonal, partial ones on it."""
    rows = math.ceil(length / 64)
    indices = torch.arange(rows).expand(rows, -1)
    indices = torch.where(indices <= torch.arange(rows)[:, None], indices, -1)[None, None]
    return fs.Selection.from_indices(indices, kv_len=length, q_len=length, q_block=64, kv_block=64)


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("length", [65, 200, 256])
def test_gradients_through_block_lists_are_those_of_the_mask(length: int, dim: int) -> None:
    """B42. Off by a hundred times at one head dim, with an exact forward."""
    inputs = tensors(length, length, dim=dim)
    seen = causal(length, length)
    selection = causal_as_blocks(length)
    matches(inputs, seen, rule=Causal())
    matches(inputs, seen, rule=Causal(), select=selection)
    matches(inputs, seen, rule=Causal(), select=selection, tile=64)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_through_block_lists_are_those_of_the_mask_on_the_gpu(
    device: torch.device, dtype: torch.dtype, listed: bool, dim: int
) -> None:
    """B42. Per head dim, in the precision people train in, against fp64."""
    inputs = tensors(512, 512, dim=dim, dtype=dtype, device=device)
    leaves = [x.requires_grad_() for x in inputs]
    select = causal_as_blocks(512).to(device) if listed else None
    out = fs.attention(*leaves, rule=Causal(), select=select)
    got = torch.autograd.grad((out * weight_like(out)).sum(), leaves)
    want = dense(*leaves, causal(512, 512).to(device))[0]
    true = torch.autograd.grad((want * weight_like(out).double()).sum(), leaves)
    relative = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for have, expected in zip((out, *got), (want, *true), strict=True):
        assert float((have - expected).abs().max()) < relative * float(expected.abs().max())


def padded_picks(length: int, keep: int) -> tuple[Tensor, Tensor]:
    """Causal picks, as many as there are, then -1; and what they let each query see."""
    draw = torch.Generator().manual_seed(8)
    order = torch.rand(2, 1, length, length, generator=draw)
    order = order.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), 2.0)
    picks = order.argsort(-1)[..., :keep]
    picks = picks.masked_fill(order.gather(-1, picks) > 1, -1)
    seen = torch.zeros(2, 1, length, length + 1, dtype=torch.bool)
    seen.scatter_(-1, torch.where(picks < 0, length, picks), True)
    return picks, seen[..., :length]


def check_canaries(device: torch.device) -> None:
    length, edge = 64, 5
    draw = torch.Generator().manual_seed(6)
    q = torch.randn(2, 4, length, 32, generator=draw).to(device).requires_grad_()
    buffers = [torch.full((2, 2, length + 2 * edge, 32), math.nan, device=device) for _ in range(2)]
    for buffer in buffers:
        inner = torch.randn(2, 2, length, 32, generator=draw)
        buffer[:, :, edge:-edge] = inner.to(device)
        buffer.requires_grad_()
    picks, seen = padded_picks(length, 16)
    selection = fs.Selection.from_indices(picks.to(device), kv_len=length, q_len=length)
    k, v = (x[:, :, edge:-edge] for x in buffers)
    out = fs.attention(q, k, v, select=selection)
    got = torch.autograd.grad((out * weight_like(out)).sum(), [q, *buffers])
    want = dense(q, k, v, seen.to(device))[0]
    true = torch.autograd.grad((want * weight_like(out)).sum(), [q, *buffers])
    atol = 2e-5 if device.type == "cpu" else 1e-2
    close(out, want, atol)
    for have, expected in zip(got, true, strict=True):
        close(have, expected, atol)
    for grad in got[1:]:
        assert bool((grad[:, :, :edge] == 0).all()) and bool((grad[:, :, -edge:] == 0).all())


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_unused_slot_reaches_no_memory_around_the_tensors(
    where: str, device: torch.device
) -> None:
    """B44. The backward added to address -1, the row before the buffer: canaries stand there."""
    check_canaries(device)


@pytest.mark.parametrize("kv_block", [1, 16])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200])
def test_gradients_through_padded_lists_are_dense(length: int, kv_block: int) -> None:
    """B44. -1 in the lists, in front and behind, of every length."""
    candidates = math.ceil(length / kv_block)
    picks, seen = padded_picks(candidates, 9)
    picks = torch.cat([torch.full_like(picks[..., :3], -1), picks.flip(-1)], -1)
    selection = fs.Selection.from_indices(
        picks, kv_len=length, q_len=length, q_block=kv_block, kv_block=kv_block
    )
    seen = seen.repeat_interleave(kv_block, -1).repeat_interleave(kv_block, -2)
    matches(
        tensors(length, length, batch=2, heads=(4, 2)),
        seen[..., :length, :length],
        select=selection,
    )


def test_a_cpu_tensor_that_needs_gradients_may_be_served(mode: None) -> None:
    """B64. Weights that require gradients were refused on CPU even under no_grad."""
    needs = torch.is_grad_enabled()
    inputs = tensors(65, 65)
    if not torch.is_inference_mode_enabled():
        inputs = [x.requires_grad_() for x in inputs]
    out, lse = fs.attention(*inputs, rule=Causal(), return_lse=True)
    want, want_lse = dense(*(x.detach() for x in inputs), causal(65, 65))
    close(out.detach(), want)
    close(lse.detach(), want_lse)
    assert out.requires_grad is needs


def test_the_compiled_kernel_serves_cpu_tensors_that_need_gradients() -> None:
    """B64, in the fused kernel: under no_grad it runs; with gradients it says what to use."""
    inputs = [x.requires_grad_() for x in tensors(65, 65)]
    with torch.no_grad():
        got = fs.attention(*inputs, rule=Causal(), backend="flex")
        close(got, dense(*inputs, causal(65, 65))[0])
    with pytest.raises(fs.FlexSparseError, match="no backward on CPU.*backend='tiles'"):
        fs.attention(*inputs, rule=Causal(), backend="flex")
    bias = torch.zeros(2, 3, requires_grad=True)
    plain = [x.detach() for x in inputs]
    with pytest.raises(fs.FlexSparseError, match="no backward on CPU.*backend='tiles'"):
        fs.attention(*plain, score=HeadBias(bias), backend="flex")


def test_a_plan_made_for_training_serves_and_the_other_way_round() -> None:
    """B64. The grad mode of the run counts, not that of the plan."""
    inputs = [x.requires_grad_() for x in tensors(65, 65)]
    want = dense(*inputs, causal(65, 65))[0]
    trained = fs.make_plan(*inputs, rule=Causal())
    with torch.no_grad():
        served = fs.make_plan(*inputs, rule=Causal())
        close(trained.run(*inputs).out, want)
    got = torch.autograd.grad(served.run(*inputs).out.square().sum(), inputs)
    for have, expected in zip(got, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        close(have, expected, atol=2e-5)


def test_gradients_are_right_to_the_last_digit_in_fp64() -> None:
    """B42, B64. Finite differences of out and lse, through selection, score and sink."""
    q, k, v = (x.double().requires_grad_() for x in tensors(5, 7, heads=(4, 2), dim=3))
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64, requires_grad=True)
    sink = torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([[[[0, 2], [1, -1], [-1, -1], [3, 0], [3, 2]]]])
    selection = fs.Selection.from_indices(indices, kv_len=7, q_len=5, kv_block=2)

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        out, lse = fs.attention(
            q,
            k,
            v,
            select=selection,
            score=Alibi(slopes) >> Softcap(2.0),
            sink=sink,
            return_lse=True,
        )
        return out, lse

    assert torch.autograd.gradcheck(run, (q, k, v, slopes, sink), fast_mode=True)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 256])
def test_low_precision_costs_no_more_than_rounding_the_answer(
    length: int, dtype: torch.dtype
) -> None:
    """B45. Judged by another bf16 kernel a good result looked wrong; the judge is fp64."""
    inputs = [(5 * x).to(dtype) for x in tensors(length, length, dim=64)]
    want, want_lse = dense(*inputs, causal(length, length))
    rounding = float((want - want.to(dtype)).abs().max())
    out, lse = fs.attention(*inputs, rule=Causal(), return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert float((out - want).abs().max()) <= 1.05 * rounding + 1e-6
    close(lse, want_lse, atol=1e-4)
    assert fs.check(*inputs, rule=Causal(), grads=True).ok


def test_a_compiled_kernel_in_bf16_is_judged_by_fp64() -> None:
    """B45, in the fused kernel, and by fs.check's own budget."""
    inputs = [(5 * x).bfloat16() for x in tensors(256, 256, dim=64)]
    want = dense(*inputs, causal(256, 256))[0]
    rounding = float((want - want.bfloat16()).abs().max())
    out = fs.attention(*inputs, rule=Causal(), backend="flex")
    assert float((out - want).abs().max()) <= 1.5 * rounding
    assert fs.check(*inputs, rule=Causal(), backend="flex").ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 160])
def test_lse_is_natural_and_minus_infinity_where_nothing_is_seen(
    length: int, dtype: torch.dtype
) -> None:
    """B47. Base 2 on one backend, zeros on another, an error in a compiler on CPU."""
    inputs = tensors(length, length, dtype=dtype)
    seen = causal(length, length) & (torch.arange(length) >= 3)
    rule = fs.MaskRule.of(lambda b, h, q, kv: (q >= kv) & (kv >= 3))
    want, want_lse = dense(*inputs, seen)
    for backend in ("auto", "tiles"):
        out, lse = fs.attention(*inputs, rule=rule, backend=backend, return_lse=True)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close(lse, want_lse)
        assert bool((lse[..., :3] == -torch.inf).all()) and bool((out[..., :3, :] == 0).all())
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 5e-6)
        close(out, want, atol=tolerance)


def test_lse_is_given_only_where_asked() -> None:
    """B47. None otherwise; and a backend that has none says so before it compiles anything."""
    inputs = tensors(65, 65)
    plan = fs.make_plan(*inputs, rule=Causal())
    assert plan.run(*inputs).lse is None
    with pytest.raises(fs.FlexSparseError, match="return_lse=True"):
        _ = plan.run(*inputs).partial
    close(plan.run(*inputs, return_lse=True).partial.lse, dense(*inputs, causal(65, 65))[1])
    before = int(compiles)
    with pytest.raises(fs.FlexSparseError, match="no lse on CPU.*backend='tiles'"):
        fs.attention(*inputs, rule=Causal(), backend="flex", return_lse=True)
    with pytest.raises(fs.FlexSparseError, match="no lse on CPU.*backend='tiles'"):
        fs.attention(*inputs, rule=Causal(), backend="flex", sink=torch.zeros(2))
    assert int(compiles) == before


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [(0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 0, 0), (1, 1, 1)])
def test_autocast_is_honoured_whatever_the_inputs_are(
    mixed: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """B58. q and k from a norm in fp32 and v in bf16: as if all were bf16, and the output is."""
    inputs = tensors(128, 128)
    given = [x.to(dtype) if low else x for x, low in zip(inputs, mixed, strict=True)]
    given = [x.requires_grad_() for x in given]
    want = dense(*(x.to(dtype) for x in inputs), causal(128, 128))[0]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    with torch.autocast("cpu", dtype=dtype):
        out, lse = fs.attention(*given, rule=Causal(), return_lse=True)
        plan = fs.make_plan(*given, rule=Causal())
        assert plan.run(*given).out.dtype == dtype
        picked = fs.attention(*given, rule=Causal(), select=Quest(block=16, keep=8, q_block=16))
    assert out.dtype == picked.dtype == dtype and lse.dtype == torch.float32
    close(out, want, atol=tolerance)
    close(picked, want, atol=tolerance)
    grads = torch.autograd.grad(out.float().square().sum(), given)
    assert [g.dtype for g in grads] == [x.dtype for x in given]


def test_the_precision_of_autocast_may_change_between_calls() -> None:
    """B58. bf16, fp16 and none in turn, with one rule object: each call gets its own."""
    inputs, rule = tensors(64, 64), Causal()
    for _ in range(3):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                assert fs.attention(*inputs, rule=rule).dtype == dtype
        assert fs.attention(*inputs, rule=rule).dtype == torch.float32


def test_autocast_leaves_fp64_alone() -> None:
    """B58. As torch does."""
    inputs = tensors(16, 16, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fs.attention(*inputs, rule=Causal()).dtype == torch.float64


@pytest.mark.parametrize("mixed", [(0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, 1)])
def test_mixed_precision_outside_autocast_is_refused(mixed: tuple[int, int, int]) -> None:
    """B58. Never silently computed in the slower precision: the message names both dtypes."""
    inputs = [x.bfloat16() if low else x for x, low in zip(tensors(16, 16), mixed, strict=True)]
    with pytest.raises(
        fs.FlexSparseError, match=r"(float32.*bfloat16|bfloat16.*float32).*autocast"
    ):
        fs.attention(*inputs, rule=Causal())


# Compilers


@pytest.fixture
def planned() -> tuple[fs.Plan, list[Tensor], Tensor]:
    """A plan with rule, candidates and score; its inputs; what is right."""
    inputs = tensors(65, 65, heads=(4, 2))
    indices = torch.tensor([[[[0, 2], [1, -1], [4, 0], [3, 2], [4, 1]]] * 2])
    selection = fs.Selection.from_indices(indices, kv_len=65, q_len=65, q_block=16, kv_block=16)
    plan = fs.make_plan(*inputs, rule=Causal(), select=selection, score=Softcap(5.0))
    seen = selection_seen(indices) & causal(65, 65)
    want = dense(*inputs, seen, lambda s: 5 * torch.tanh(s / 5))[0]
    return plan, inputs, want


def selection_seen(indices: Tensor) -> Tensor:
    chosen = (indices[..., None] == torch.arange(5)).any(-2)
    return (
        chosen.repeat_interleave(16, -1).repeat_interleave(16, -2)[..., :65, :65]
        .repeat_interleave(2, 1)
    )  # fmt: skip


def test_a_plan_runs_inside_a_compiled_function(
    planned: tuple[fs.Plan, list[Tensor], Tensor],
) -> None:
    """B62. User code compiles around it, whole, without a graph break."""
    plan, inputs, want = planned
    function = torch.compile(lambda q, k, v: plan.run(q * 1, k, v).out + 0, fullgraph=True)
    close(function(*inputs), want)
    leaves = [x.clone().requires_grad_() for x in inputs]
    got = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    true = torch.autograd.grad(plan.run(*leaves).out.square().sum(), leaves)
    for have, expected in zip(got, true, strict=True):
        close(have, expected)


def test_a_layout_is_made_inside_a_compiled_function(
    planned: tuple[fs.Plan, list[Tensor], Tensor],
) -> None:
    """B62. Candidates to layout to attention in one graph; new candidates need no new graph."""
    plan, inputs, _ = planned
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(indices: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        selection = fs.Selection.from_indices(
            indices, kv_len=65, q_len=65, q_block=16, kv_block=16, out_of_range="drop"
        )
        return plan.run(q, k, v, plan.layout(selection)).out

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        indices = torch.randint(-2, 7, (1, 2, 5, 3), generator=draw)
        seen = selection_seen(torch.where(indices < 5, indices, -1)) & causal(65, 65)
        want = dense(*inputs, seen, lambda s: 5 * torch.tanh(s / 5))[0]
        close(compiled(indices, *inputs), want)
    assert len(graphs) == 1


def test_a_layout_is_an_argument_of_a_compiled_function(
    planned: tuple[fs.Plan, list[Tensor], Tensor],
) -> None:
    """B62. A layout made outside, handed in."""
    plan, inputs, want = planned
    function = torch.compile(
        lambda q, k, v, layout: plan.run(q, k, v, layout).out, fullgraph=True, backend="eager"
    )
    close(function(*inputs, plan.first), want)


def test_the_fused_kernel_runs_inside_a_compiled_function() -> None:
    """B62. The compiled backend is inlined into the user's graph."""
    inputs = tensors(65, 65)
    plan = fs.make_plan(*inputs, rule=Causal(), backend="flex")
    function = torch.compile(lambda q, k, v: plan.run(q, k, v).out, fullgraph=True)
    close(function(*inputs), dense(*inputs, causal(65, 65))[0])


class Attends(torch.nn.Module):
    """A module that holds a plan."""

    def __init__(self, plan: fs.Plan) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plan.run(q, k, v).out


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_with_a_plan_is_exported(
    planned: tuple[fs.Plan, list[Tensor], Tensor], strict: bool
) -> None:
    """B62. The exported program equals eager, on other values too."""
    plan, inputs, want = planned
    module = Attends(plan)
    program = torch.export.export(module, tuple(inputs), strict=strict)
    close(program.module()(*inputs), want)
    other = [x.flip(2) for x in inputs]
    close(program.module()(*other), module(*other))


def test_a_layout_is_an_input_of_an_exported_module(
    planned: tuple[fs.Plan, list[Tensor], Tensor],
) -> None:
    """B62. A mask as an input was rejected: its type must be known to the exporter."""
    plan, inputs, want = planned

    class Given(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: fs.Layout) -> Tensor:
            return plan.run(q, k, v, layout).out

    program = torch.export.export(Given(), (*inputs, plan.first))
    close(program.module()(*inputs, plan.first), want)


def test_an_empty_row_inside_a_compiled_function_is_pending() -> None:
    """B62, B20. The host cannot look there: a flag is set on the device, and read afterwards."""
    q, k, v = tensors(3, 8)
    full = torch.zeros(1, 1, 3, 1, dtype=torch.int64)
    selection = fs.Selection.from_indices(full, kv_len=8, q_len=3)
    plan = fs.make_plan(q, k, v, select=selection, empty="error")

    def step(indices: Tensor) -> fs.Layout:
        chosen = fs.Selection.from_indices(indices, kv_len=8, q_len=3, out_of_range="drop")
        return plan.layout(chosen)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    plan.raise_pending(compiled(full))
    layout = compiled(torch.where(torch.arange(3)[:, None] == 1, -1, full))
    with pytest.raises(fs.FlexSparseError, match="sees no key"):
        plan.raise_pending(layout)
