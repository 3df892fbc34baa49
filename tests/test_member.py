"""Tiles that ask for single keys, by the kernel that loads a word of membership for eight pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import close
from torch import Tensor

import flexsparse as fs
from flexsparse.backends import Work, member
from flexsparse.masks import Causal, SlidingWindow

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

CUDA = torch.device("cuda")


def qkv(
    heads: tuple[int, int], length: int, dims: tuple[int, int] = (32, 32), batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    draw = torch.Generator(CUDA).manual_seed(1)
    q, k, v = (
        torch.randn(batch, h, length, d, device=CUDA, generator=draw).to(dtype)
        for h, d in zip((heads[0], heads[1], heads[1]), (dims[0], *dims), strict=True)
    )
    return q, k, v


def tokens(batch: int, heads: int, length: int, width: int) -> fs.Selection:
    draw = torch.Generator(CUDA).manual_seed(2)
    shape = (batch, heads, length, width)
    indices = torch.randint(-1, length, shape, device=CUDA, generator=draw)
    # Somebody selects nothing.
    indices[..., -1, :] = -1
    return fs.Selection.from_indices(indices, q_len=length, kv_len=length)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The works that the own kernel was given."""
    works: list[Work] = []
    run = member.run

    def noted(work: Work) -> Any:
        works.append(work)
        return run(work)

    monkeypatch.setattr(member, "run", noted)
    return works


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200, 513])
@pytest.mark.parametrize("rule", [None, Causal()], ids=["any", "causal"])
def test_lengths(ran: list[Work], length: int, rule: fs.MaskRule | None) -> None:
    options: dict[str, Any] = {"backend": "flex", "tile": (128, 128), "pack": "identity"}
    select = tokens(2, 1, length, 11)
    fs.check(
        *qkv((4, 2), length), rule=rule, select=select, grads=True, **options
    ).raise_if_failed()
    # One query alone has words of another form.
    assert ran or length == 1


@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (3, 3)], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("lists", ["shared", "kv", "query"])
@pytest.mark.parametrize("pack", ["identity", "fold"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_heads(
    ran: list[Work], heads: tuple[int, int], lists: str, pack: str, dtype: torch.dtype
) -> None:
    own = {"shared": 1, "kv": heads[1], "query": heads[0]}[lists]
    batch = 2 if lists == "kv" else 1
    given = qkv(heads, 200, (64, 128), dtype=dtype)
    options: dict[str, Any] = {"backend": "flex", "tile": (128, 256), "pack": pack}
    select = tokens(batch, own, 200, 33)
    fs.check(*given, rule=Causal(), select=select, grads=True, **options).raise_if_failed()
    assert ran


def test_gradients_through_lse(ran: list[Work]) -> None:
    select = tokens(1, 1, 200, 20)
    found = []
    for backend, dtype in (("flex", torch.bfloat16), ("tiles", torch.float32)):
        q, k, v = (x.to(dtype).requires_grad_() for x in qkv((4, 2), 200))
        out, lse = fs.attention(
            q,
            k,
            v,
            select=select,
            backend=backend,
            tile=(128, 128),
            pack="identity",
            return_lse=True,
        )
        seen = torch.where(lse.isinf(), 0, lse)
        found.append(
            [lse.detach(), *torch.autograd.grad(seen.sum() + out.float().sum(), (q, k, v))]
        )
    assert ran
    (lse, *got), (right, *want) = found
    assert torch.equal(lse.isinf(), right.isinf())
    close(torch.where(lse.isinf(), 0, lse), torch.where(right.isinf(), 0, right), atol=2e-2)
    for own, other in zip(got, want, strict=True):
        close(own.float() / other.abs().max(), other / other.abs().max(), atol=2e-2)


def test_the_same_bits_twice_and_inside_compiled_code_and_a_graph(ran: list[Work]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv((4, 2), 384, (64, 64)))
    select = tokens(1, 1, 384, 40)
    plan = fs.make_plan(
        q, k, v, rule=Causal(), select=select, backend="flex", tile=(128, 128), pack="identity"
    )
    layout = plan.layout(select)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plan.run(q, k, v, layout).out

    def trained(call: Any) -> list[Tensor]:
        out = call(q, k, v)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    first = trained(step)
    assert ran
    for call in (step, torch.compile(step, fullgraph=True)):
        for a, b in zip(first, trained(call), strict=True):
            assert torch.equal(a, b)
    graph, still = torch.cuda.CUDAGraph(), [x.detach() for x in (q, k, v)]
    with torch.no_grad():
        step(*still)
        with torch.cuda.graph(graph):
            out = step(*still)
    graph.replay()
    assert torch.equal(out, first[0])


def test_what_else_is_asked_goes_through_flexattention(ran: list[Work]) -> None:
    given, select = qkv((4, 2), 200), tokens(1, 1, 200, 20)
    asked: list[dict[str, Any]] = [
        {"rule": SlidingWindow(50)},
        {"rule": Causal(), "score": fs.ScoreRule.of(lambda s, b, h, q, kv: s * 0.5)},
        {"rule": Causal(), "fallback": ("local", 4)},
        {"rule": Causal(), "pack": "pack"},
    ]
    for options in asked:
        how = {"pack": "identity", "backend": "flex", "tile": (128, 128)} | options
        fs.check(*given, select=select, **how).raise_if_failed()
    assert not ran
