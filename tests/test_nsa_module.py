"""Native Sparse Attention against its equations, written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from selector_definitions import Worth
from torch import Tensor

import flexsparse as fs
from flexsparse.modules import Branches, NSAAttention
from flexsparse.selectors import NSA, Quest

HEADS, KV_HEADS, DIM, V_DIM, FEATURES, WINDOW = 4, 2, 8, 6, 10, 5
LENGTH, STRIDE, BLOCK, KEEP = 4, 2, 8, 4


def module(phi: str, **options: Any) -> NSAAttention:
    torch.manual_seed(0)
    selector = NSA(length=LENGTH, stride=STRIDE, block=BLOCK, keep=KEEP)
    made = NSAAttention(
        HEADS, KV_HEADS, DIM, FEATURES, v_dim=V_DIM, selector=selector, window=WINDOW, phi=phi, **options
    )  # fmt: skip
    return made.double()


def inputs(q_len: int, kv_len: int, separate: bool = False) -> list[Any]:
    draw = torch.Generator().manual_seed(q_len + 1000 * kv_len)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    def spread(dim: int) -> Any:
        make = [leaf(2, KV_HEADS, kv_len, dim) for _ in range(3 if separate else 1)]
        return Branches(*make) if separate else make[0]

    return [leaf(2, HEADS, q_len, DIM), spread(DIM), spread(V_DIM), leaf(2, q_len, FEATURES)]


def softmax_over(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    if not keys:
        return torch.zeros(V_DIM, dtype=torch.float64)
    scores = torch.stack([q @ key for key in keys]) / math.sqrt(DIM)
    return scores.softmax(0) @ torch.stack(values)


def compressed(phi: Any, x: Tensor) -> list[Tensor]:
    """One vector a whole window of ``x [S, D]``."""
    made = []
    for start in range(0, x.shape[0] - LENGTH + 1, STRIDE):
        window = [x[start + i] for i in range(LENGTH)]
        if hasattr(phi, "mlp"):
            first, _, second = phi.mlp
            joined = torch.cat([token + phi.place[i] for i, token in enumerate(window)])
            hidden = torch.nn.functional.gelu(first.weight @ joined + first.bias)
            made.append(second.weight @ hidden + second.bias)
        else:
            made.append(sum(window) / LENGTH)
    return made


def chosen(q: Tensor, keys: list[Tensor], p: int, blocks: int) -> set[int]:
    """The blocks of one group at position p: ``q [G, D]``, compressed ``keys``."""
    worth: Worth = dict.fromkeys(range(blocks), 0.0)
    seen = [i for i in range(len(keys)) if i * STRIDE + LENGTH - 1 <= p]
    for head in q:
        if not seen:
            break
        mass = (torch.stack([head @ keys[i] for i in seen]) / math.sqrt(DIM)).softmax(0).tolist()
        for i, m in zip(seen, mass, strict=True):
            for n in range(LENGTH // STRIDE):
                worth[(i + n) * STRIDE // BLOCK] += m
    own = p // BLOCK
    order = sorted(range(own + 1), key=lambda j: (j not in (0, own - 1, own), -worth[j], j))
    return set(order[:KEEP])


def written_out(attend: NSAAttention, q: Tensor, k: Any, v: Any, x: Tensor, offset: int) -> Tensor:
    k, v = (y if isinstance(y, Branches) else Branches(y, y, y) for y in (k, v))
    length = k.window.shape[2]
    group = HEADS // KV_HEADS
    out = []
    for b in range(q.shape[0]):
        coarse = [
            (compressed(attend.compress_keys, k.compression[b, g]),
             compressed(attend.compress_values, v.compression[b, g]))
            for g in range(KV_HEADS)
        ]  # fmt: skip
        for t in range(q.shape[2]):
            p = t + offset
            gates = (attend.gate.weight @ x[b, t] + attend.gate.bias).sigmoid().view(3, HEADS)
            for h in range(HEADS):
                g = h // group
                keys, values = coarse[g]
                whole = [i for i in range(len(keys)) if i * STRIDE + LENGTH - 1 <= p]
                blocks = chosen(
                    q[b, g * group : (g + 1) * group, t].detach(), [y.detach() for y in keys], p,
                    -(-length // BLOCK),
                )  # fmt: skip
                inside = [s for s in range(min(p + 1, length)) if s // BLOCK in blocks]
                near = range(max(0, p - WINDOW + 1), min(p + 1, length))
                parts = [
                    softmax_over(q[b, h, t], [keys[i] for i in whole], [values[i] for i in whole]),
                    softmax_over(
                        q[b, h, t], [k.selection[b, g, s] for s in inside],
                        [v.selection[b, g, s] for s in inside],
                    ),
                    softmax_over(
                        q[b, h, t], [k.window[b, g, s] for s in near], [v.window[b, g, s] for s in near]
                    ),
                ]  # fmt: skip
                out.append(sum(gate * part for gate, part in zip(gates[:, h], parts, strict=True)))
    return torch.stack(out).view(q.shape[0], q.shape[2], HEADS, V_DIM).transpose(1, 2)


def leaves(attend: NSAAttention, tensors: list[Any]) -> list[Tensor]:
    flat = [y for x in tensors for y in (x if isinstance(x, Branches) else [x])]
    return flat + list(attend.parameters())


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize("phi", ["mlp", "mean"])
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (65, 65), (1, 50), (9, 64)], ids=str)
def test_outputs_and_gradients_are_those_of_the_equations(
    lengths: tuple[int, int], phi: str, separate: bool
) -> None:
    attend, tensors = module(phi), inputs(*lengths, separate)
    got = attend(*tensors)
    want = written_out(attend, *tensors, lengths[1] - lengths[0])
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(5)).double()
    over = leaves(attend, tensors)
    grads = [
        torch.autograd.grad((out * weight).sum(), over, allow_unused=True) for out in (got, want)
    ]
    for mine, true in zip(*grads, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if mine is None else mine + zero, zero if true is None else true + zero,
            atol=1e-9, rtol=1e-7, check_dtype=False,
        )  # fmt: skip


def test_gradients_by_differences() -> None:
    attend, tensors = module("mlp"), inputs(6, 6)
    one = [x[:1, :, :].detach().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *x: attend(*x), one, fast_mode=True)


def test_a_prompt_in_parts_is_the_prompt() -> None:
    """Queries told where they stand; also each sequence at a place of its own."""
    attend, (q, k, v, x) = module("mlp"), inputs(65, 65)
    whole = attend(q, k, v, x)
    parts = [
        attend(q[:, :, at : at + 13], k, v, x[:, at : at + 13], q_offset=at)
        for at in range(0, 65, 13)
    ]
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    at = torch.tensor([20, 64])
    step = torch.stack([q[b, :, p] for b, p in enumerate(at)])[:, :, None]
    told = torch.stack([x[b, p] for b, p in enumerate(at)])[:, None]
    decoded = attend(step, k, v, told, q_offset=at)
    torch.testing.assert_close(decoded[:, :, 0], torch.stack([whole[0, :, 20], whole[1, :, 64]]))


def test_it_learns() -> None:
    """All of its weights move, and the loss falls."""
    attend, (q, k, v, x) = module("mlp").float(), inputs(40, 40)
    q, k, v, x = (y.detach().float() for y in (q, k, v, x))
    target = torch.randn(2, HEADS, 40, V_DIM, generator=torch.Generator().manual_seed(2))
    before = {name: p.detach().clone() for name, p in attend.named_parameters()}
    optimizer = torch.optim.Adam(attend.parameters(), lr=0.02)
    losses = []
    for _ in range(12):
        loss = (attend(q, k, v, x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in attend.named_parameters())


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_it_is_on_a_cpu() -> None:
    """fp32 in the kernels that are chosen there, with gradients."""
    here, tensors = module("mlp"), inputs(65, 130)
    there = module("mlp").float().cuda()
    moved = [x.detach().float().cuda().requires_grad_() for x in tensors]
    got, want = there(*moved), here(*tensors)
    torch.testing.assert_close(got.double().cpu(), want, atol=2e-3, rtol=2e-3)
    grads = [
        torch.autograd.grad(out.square().sum(), leaves(*made))
        for out, made in ((got, (there, moved)), (want, (here, tensors)))
    ]
    largest = max(true.norm() for true in grads[1])
    for mine, true in zip(*grads, strict=True):
        # What is added to every key alike moves no weight: of such a bias only the rounding is left.
        assert (mine.double().cpu() - true).norm() < 1e-2 * true.norm() + 1e-7 * largest


def test_wrong_inputs_are_named() -> None:
    attend, (q, k, v, x) = module("mean"), inputs(7, 7)
    for wrong, message in (
        (lambda: attend(k, k, v, x), "4 heads over 2 KV heads got"),
        (lambda: attend(q, k, v, x[:, :3]), r"x \[B, Q, features\]"),
        (lambda: module("max"), "'mlp' or 'mean'"),
        (lambda: NSAAttention(3, 2, 8, 8), "multiple of kv_heads"),
        (lambda: NSAAttention(4, 2, 8, 8, v_dim=0), "v_dim must be at least 1"),
        (lambda: NSAAttention(4, 2, 8, 8, selector=Quest()), "must be an NSA, got Quest"),  # type: ignore[arg-type]
        (lambda: attend(q, k, v, x[..., :1]), "got k, v and x of"),
        (lambda: attend(q, k, v[..., :1], x), "got k, v and x of"),
        (
            lambda: attend.selector.choose(q, k, fs.Grid(7, 7, batch=2)),
            "each of the 2 whole windows",
        ),
    ):
        with pytest.raises(fs.FlexSparseError, match=message):
            wrong()
