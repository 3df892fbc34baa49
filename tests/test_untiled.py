"""The backends that visit no tiles: candidates gathered key by key, and all pairs at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import Call, tensors
from oracle import close
from torch import Tensor

import flexsparse as fs
from flexsparse.backends import dense, gather, gathered
from flexsparse.masks import Alibi, AttentionSink, Causal, Document, Softcap

UNTILED = ("gather", "dense")
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int] = (16, 16), **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(2, heads[0], lengths[0], dims[0], seed=1, **how),
        normal(2, heads[1], lengths[1], dims[0], seed=2, **how),
        normal(2, heads[1], lengths[1], dims[1], seed=3, **how),
    )


def tokens(heads: int, lengths: tuple[int, int], width: int, **how: Any) -> fs.Selection:
    draw = torch.Generator().manual_seed(4)
    indices = torch.randint(-1, lengths[1], (2, heads, lengths[0], width), generator=draw)
    return fs.Selection.from_indices(indices, q_len=lengths[0], kv_len=lengths[1], **how)


def checked(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    fs.check(q, k, v, **options, backend=backend, grads=True).raise_if_failed()


@pytest.mark.parametrize("backend", UNTILED)
@pytest.mark.parametrize("heads", [(64, 1), (6, 2), (3, 3)], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("lists", ["shared", "kv", "query"])
def test_heads(backend: str, heads: tuple[int, int], lists: str) -> None:
    own = {"shared": 1, "kv": heads[1], "query": heads[0]}[lists]
    lengths = (9, 37)
    rule = Causal() | fs.MaskRule.of(lambda b, h, q, kv: (kv + h) % 3 == b)
    for seen_by in (None, Causal(), rule):
        checked(
            backend, *qkv(heads, lengths, (16, 24)), rule=seen_by, select=tokens(own, lengths, 11)
        )


@pytest.mark.parametrize("backend", UNTILED)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (7, 3), (65, 63)])
def test_lists_wider_than_the_keys_with_repeats(backend: str, lengths: tuple[int, int]) -> None:
    select = tokens(2, lengths, 90)
    checked(backend, *qkv((4, 2), lengths), rule=Causal(), select=select, fallback=("local", 99))


@pytest.mark.parametrize("backend", UNTILED)
def test_nothing_to_see(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv((4, 2), (5, 9)))
    select = fs.Selection.from_indices(torch.full((1, 1, 5, 3), -1), q_len=5, kv_len=9)
    out, lse = fs.attention(q, k, v, select=select, backend=backend, return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())
    out = fs.attention(q, k, v, select=select, backend=backend)
    assert not out.any()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("backend", UNTILED)
@pytest.mark.parametrize("lse", [False, True])
def test_keys_that_nobody_sees_may_hold_anything(backend: str, lse: bool) -> None:
    lengths = (8, 40)
    q, k, v = qkv((4, 2), lengths)
    # Key 5 is no candidate; key 6 is one of every row, and the rule hides it.
    indices = torch.tensor([0, 3, 6, 38, 39]).expand(1, 1, 8, 5)
    select = fs.Selection.from_indices(indices, q_len=8, kv_len=40)
    rule = fs.MaskRule.of(lambda b, h, q, kv: kv != 6)
    want = fs.reference(q, k, v, rule=rule, select=select)
    for bad in (torch.nan, torch.inf):
        k[:, :, 5:7], v[:, :, 5:7] = bad, bad
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        got = fs.attention(*given, rule=rule, select=select, backend=backend, return_lse=lse)
        out, got_lse = got if lse else (got, None)
        close(out, want.out)
        if got_lse is not None:
            close(got_lse, want.lse)
        dq, dk, dv = torch.autograd.grad(out.sum() + (got_lse.sum() if lse else 0), given)
        assert bool(dq.isfinite().all())
        assert not dk[:, :, 5:7].any() and not dv[:, :, 5:7].any()
        assert bool(dk.isfinite().all()) and bool(dv.isfinite().all())


@pytest.mark.parametrize("backend", UNTILED)
def test_ragged_documents_with_learned_scores_and_sink(backend: str) -> None:
    lengths = (40, 40)
    ids = torch.tensor([[0] * 13 + [1] * 27, [0] * 1 + [1] * 30 + [2] * 9])
    slopes = torch.rand(6, generator=torch.Generator().manual_seed(5)).requires_grad_()
    checked(
        backend,
        *qkv((6, 2), lengths),
        rule=Causal() & (Document(ids) | AttentionSink(2)),
        select=tokens(2, lengths, 12),
        score=Alibi(slopes) >> Softcap(3.0),
        sink=normal(6).requires_grad_(),
        fallback="self",
    )


@pytest.mark.parametrize("backend", UNTILED)
@pytest.mark.parametrize("scored", [False, True])
def test_gradients_in_double_precision(backend: str, scored: bool) -> None:
    lengths = (5, 7)
    q, k, v = (x.requires_grad_() for x in qkv((4, 2), lengths, (3, 2), dtype=torch.float64))
    bias = normal(7, dtype=torch.float64).requires_grad_()
    score = fs.ScoreRule.of(lambda s, b, h, q, kv: s * s * 0.1 + bias[kv] * s) if scored else None
    options: dict[str, Any] = {
        "rule": Causal(), "select": tokens(2, lengths, 4), "score": score, "fallback": "self",
        "backend": backend,
    }  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = fs.attention(q, k, v, return_lse=True, **options)
        return out, torch.where(lse == -torch.inf, 0, lse)

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


@pytest.mark.parametrize("backend", UNTILED)
@pytest.mark.parametrize("budget", [1, 20_000])
def test_parts_amount_to_the_whole(
    backend: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query and one key at a time, or a few of each."""
    for module in (gathered, dense):
        monkeypatch.setattr(module, "BYTES_AT_ONCE", {"cpu": budget})
    for q_block, kv_block in ((1, 1), (4, 8)):
        call = Call(
            score="capped alibi", q_len=21, kv_len=33, sharing="kv", q_block=q_block,
            kv_block=kv_block, fallback=("local", 3), sink=True, batch=2, offset="each",
        )  # fmt: skip
        inputs, options = tensors(call, CPU)
        checked(backend, *inputs, **options)


def test_gathered_memory_is_bounded() -> None:
    """However long the lists: a chunk holds as many queries and slots as its budget pays for."""
    lengths = (64, 4000)
    q, k, v = qkv((4, 1), lengths, (64, 64))
    plan = fs.make_plan(q, k, v, select=tokens(1, lengths, 4000), backend="gather", tile=(64, 128))
    with torch.profiler.profile(profile_memory=True) as traced:
        plan.run(q, k, v)
    largest = max(e.cpu_memory_usage for e in traced.events())
    # All keys of all lists side by side would take 128 MiB and more.
    assert largest < 2 * gathered.BYTES_AT_ONCE["cpu"]


def test_there_must_be_something_to_gather() -> None:
    q, k, v = qkv((4, 2), (5, 9))
    with pytest.raises(fs.errors.BackendError, match=r"gather.*no.*selection|select="):
        fs.attention(q, k, v, rule=Causal(), backend="gather")


def test_a_mask_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MOST_PAIRS", 44)
    q, k, v = qkv((4, 2), (5, 9))
    with pytest.raises(fs.errors.BackendError, match="mask of 45 pairs"):
        fs.attention(q, k, v, rule=AttentionSink(3), backend="dense")
    # What torch has a kernel for needs none.
    fs.attention(q, k, v, backend="dense")


@pytest.mark.parametrize(
    ("lengths", "options", "causal"),
    [
        ((9, 9), {"rule": Causal()}, True),
        ((9, 9), {"rule": fs.MaskRule.of(lambda b, h, q, kv: q >= kv)}, True),
        ((9, 9), {}, False),
        ((5, 9), {}, False),
        ((1, 9), {"rule": Causal()}, False),
        ((5, 9), {"rule": Causal()}, None),
        ((9, 9), {"rule": Causal(), "q_offset": 1}, None),
        ((9, 9), {"rule": fs.MaskRule.of(lambda b, h, q, kv: q > kv)}, None),
    ],
)
def test_what_torch_has_a_kernel_for(
    lengths: tuple[int, int], options: dict[str, Any], causal: bool | None
) -> None:
    q, k, v = qkv((4, 2), lengths)
    plan = fs.make_plan(q, k, v, backend="dense", **options)
    assert plan.first is not None
    selected = plan.first.select is not None
    assert dense.known(plan.program, plan.grid, selected=selected) is causal
    close(plan.run(q, k, v).out, fs.reference(q, k, v, **options).out)
    checked("dense", q, k, v, **options)


@pytest.mark.parametrize("backend", UNTILED)
def test_user_code_compiles_around_them(backend: str) -> None:
    lengths = (9, 37)
    q, k, v = (x.requires_grad_() for x in qkv((4, 2), lengths))
    rule, select = Causal(), tokens(2, lengths, 11)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fs.attention(q * 2, k, v, rule=rule, select=select, backend=backend).sum()

    want = torch.autograd.grad(run(q, k, v), (q, k, v))
    got = torch.autograd.grad(
        torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v)
    )
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("backend", UNTILED)
def test_nobody_reads_their_lists_by_column(backend: str) -> None:
    lengths = (9, 37)
    q, k, v = (x.requires_grad_() for x in qkv((4, 2), lengths))
    result = fs.make_plan(q, k, v, select=tokens(2, lengths, 11), backend=backend).run(q, k, v)
    assert result.layout.columns is None
    result.out.sum().backward()
    assert k.grad is not None


ON_GPU = {
    "mqa": {"group": 64, "kv_heads": 1, "head_dim": 128, "width": 70},
    "wide mqa": {"group": 130, "kv_heads": 1, "head_dim": 64},
    "gqa": {"group": 4, "kv_heads": 2, "head_dim": 128, "width": 70},
    "a list a query head": {"group": 4, "sharing": "query"},
    "rule by head": {"group": 20, "rule": "band"},
    "offsets": {"group": 4, "offset": "each", "batch": 3, "fallback": ("local", 9)},
    "blocks": {"q_block": 7, "kv_block": 16, "sink": True},
    "blocks a token": {"group": 16, "kv_block": 64, "width": 4, "head_dim": 128},
    "blocks a token, a list a query head": {"kv_block": 16, "group": 4, "sharing": "query"},
    "blocks a token, rule by head": {"kv_block": 32, "group": 3, "rule": "band", "head_dim": 24},
    "blocks a token, offsets": {"kv_block": 128, "offset": "each", "batch": 3, "group": 40},
    "blocks beyond the keys": {"kv_block": 64, "kv_len": 50, "rule": "none", "width": 2},
    "blocks of many readers": {"q_len": 1100, "kv_len": 1100, "kv_block": 64, "group": 2},
    "odd dims": {"head_dim": 24},
    "large dims": {"head_dim": 192, "group": 16},
    "learned score": {"score": "alibi"},
    "decode": {"q_len": 1, "rule": "causal"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", UNTILED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ON_GPU)
def test_kernels_agree_with_the_reference(
    name: str, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    given: dict[str, Any] = {
        "q_len": 65,
        "kv_len": 300,
        "sharing": "kv",
        "width": 40,
        **ON_GPU[name],
    }
    inputs, options = tensors(Call(dtype=dtype, seed=7, **given), device)
    checked(backend, *inputs, **options)


@pytest.mark.gpu
def test_lists_in_chunks_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "BYTES_AT_ONCE", {"cuda": 2**17})
    call = Call(q_len=65, kv_len=300, sharing="kv", width=40, dtype=torch.bfloat16)
    inputs, options = tensors(call, device)
    checked("gather", *inputs, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_key_outside_the_lists_is_read_on_a_gpu(
    dtype: torch.dtype, device: torch.device
) -> None:
    lengths = (33, 200)
    q, k, v = (x.to(device) for x in qkv((16, 1), lengths, (64, 64), dtype=dtype))
    indices = torch.randint(100, 200, (2, 1, 33, 40), generator=torch.Generator().manual_seed(1))
    select = fs.Selection.from_indices(indices.to(device), q_len=33, kv_len=200)
    rule = fs.MaskRule.of(lambda b, h, q, kv: kv != 150)
    want = fs.attention(q, k, v, rule=rule, select=select, backend="gather")
    for bad in (slice(0, 100), slice(150, 151)):
        k[:, :, bad], v[:, :, bad] = torch.nan, torch.nan
    given = [x.requires_grad_() for x in (q, k, v)]
    out = fs.attention(*given, rule=rule, select=select, backend="gather")
    assert torch.equal(out, want)
    grads = torch.autograd.grad(out.sum(), given)
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not grads[1][:, :, :100].any() and not grads[2][:, :, 150].any()
