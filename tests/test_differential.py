"""Every backend against the dense fp64 reference, over rules, selections, heads, lengths, precisions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from calls import GROUPS, LENGTHS, RULES, SCORES, SQUARE_RULES, Call, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexsparse as fs
from flexsparse.device import compiles

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


@st.composite
def calls(draw: Any, **fixed: Any) -> Call:
    """Any call; ``fixed`` holds values that are not drawn."""
    pick = st.sampled_from
    q_len, kv_len = draw(pick(LENGTHS)), draw(pick(LENGTHS))
    fallback = draw(pick((None, "self", ("local", 1 + draw(st.integers(0, 80))))))
    packed = draw(st.booleans())
    call = Call(
        rule=draw(pick(sorted(RULES))),
        score=draw(pick(sorted(SCORES))),
        q_len=q_len,
        kv_len=kv_len,
        batch=draw(pick((1, 2, 3))),
        kv_heads=draw(pick((1, 2))),
        group=draw(pick((1, 2, 3, 4, 16) if packed else GROUPS)),
        sharing=draw(
            pick(("none", "shared", "kv") if packed else ("none", "shared", "kv", "query"))
        ),
        q_block=draw(pick((1, 7, 64, 300))),
        kv_block=draw(pick((1, 5, 16, 64, 300))),
        width=draw(pick((1, 5, 70))),
        dtype=draw(pick(DTYPES)),
        tile=draw(pick((None, (16, 16), (128, 64), (48, 80), (17, 100)))),
        pack="pack" if packed else None,
        fallback=fallback,
        sink=draw(st.booleans()),
        offset=draw(pick(("default", "0", "-5", "each"))),
        seed=draw(st.integers(0, 2**16)),
    )
    if call.rule in SQUARE_RULES:
        call = dataclasses.replace(call, q_len=min(q_len, kv_len), offset="default")
    return dataclasses.replace(call, **fixed)


@st.composite
def uneven_calls(draw: Any) -> Call:
    """Calls in tiles so small that rows and columns have many, cut from a few on."""
    tile = draw(st.sampled_from(((16, 16), (16, 32), (32, 16), (48, 20), (17, 16))))
    return draw(calls(tile=tile, split=draw(st.sampled_from((1, 2, 3, 5)))))


@st.composite
def clustered_calls(draw: Any) -> Call:
    """Calls whose rows are laid in an order of their own, several to a tile."""
    q_block = draw(st.sampled_from((1, 2, 4, 7)))
    packed = draw(st.booleans())
    group = draw(st.sampled_from((1, 2, 4)))
    rows = (group if packed else 1) * q_block * draw(st.sampled_from((2, 5, 8)))
    call = draw(
        calls(
            q_block=q_block,
            group=group,
            q_len=draw(st.sampled_from([n for n in LENGTHS if n > q_block])),
            tile=(max(rows, rows * -(-16 // rows)), draw(st.sampled_from((16, 20, 64)))),
            pack="pack" if packed else "identity",
            sharing=draw(
                st.sampled_from(("shared", "kv") if packed else ("shared", "kv", "query"))
            ),
            fallback=None,
            split=draw(st.sampled_from((None, None, 2))),
            cluster=True,
        )
    )
    if call.rule in SQUARE_RULES:
        call = dataclasses.replace(call, kv_len=200)
    return call


def judge(call: Call, device: torch.device, backend: str, grads: bool = True) -> None:
    inputs, options = tensors(call, device)
    fs.check(*inputs, **options, backend=backend, grads=grads, seed=call.seed).raise_if_failed()


@settings(max_examples=120, **SETTINGS)
@given(calls())
def test_tiles_agree_with_the_reference(call: Call) -> None:
    judge(call, torch.device("cpu"), "tiles")


@settings(max_examples=80, **SETTINGS)
@given(uneven_calls())
def test_rows_and_columns_in_pieces_agree_with_the_reference(call: Call) -> None:
    judge(call, torch.device("cpu"), "tiles")


@settings(max_examples=60, **SETTINGS)
@given(clustered_calls())
def test_clustered_rows_agree_with_the_reference(call: Call) -> None:
    judge(call, torch.device("cpu"), "tiles")


@pytest.mark.slow
@settings(max_examples=2000, **SETTINGS)
@given(clustered_calls())
def test_clustered_rows_agree_with_the_reference_at_length(call: Call) -> None:
    judge(call, torch.device("cpu"), "tiles")


@pytest.mark.slow
@settings(max_examples=2000, **SETTINGS)
@given(uneven_calls())
def test_pieces_agree_with_the_reference_at_length(call: Call) -> None:
    judge(call, torch.device("cpu"), "tiles")


@pytest.mark.slow
@settings(max_examples=3000, **SETTINGS)
@given(calls())
def test_tiles_agree_with_the_reference_at_length(call: Call) -> None:
    judge(call, torch.device("cpu"), "tiles")


SELECTED = st.sampled_from(("shared", "kv", "query"))


def selecting(call: Call, sharing: str) -> Call:
    """The call with candidates; a list a query head of its own cannot be packed."""
    pack = None if sharing == "query" else call.pack
    return dataclasses.replace(call, sharing=sharing, pack=pack)


@settings(max_examples=50, **SETTINGS)
@given(calls(), SELECTED)
def test_gathered_candidates_agree_with_the_reference(call: Call, sharing: str) -> None:
    judge(selecting(call, sharing), torch.device("cpu"), "gather")


@settings(max_examples=60, **SETTINGS)
@given(calls())
def test_dense_agrees_with_the_reference(call: Call) -> None:
    judge(call, torch.device("cpu"), "dense")


@pytest.mark.slow
@settings(max_examples=1500, **SETTINGS)
@given(calls(), SELECTED)
def test_backends_without_tiles_agree_at_length(call: Call, sharing: str) -> None:
    judge(call, torch.device("cpu"), "dense")
    judge(selecting(call, sharing), torch.device("cpu"), "gather")


# On CPU each of these is one kernel: what they fix is code, what is drawn below is tensors.
FUSED = [
    Call(rule="causal", sharing="kv", kv_block=16, q_len=65, kv_len=200, group=4, dtype=torch.bfloat16),
    Call(rule="streaming", sharing="none", q_len=200, kv_len=200, group=3, tile=(128, 64)),
    Call(rule="document", sharing="query", q_len=63, kv_len=63, group=1, tile=(17, 100)),
    Call(rule="heads", score="softcap", sharing="shared", q_block=7, q_len=7, kv_len=64, group=9),
    Call(rule="causal", sharing="kv", kv_block=64, q_len=1, kv_len=200, group=3, dtype=torch.float16),
    Call(rule="padding", score="alibi", sharing="none", q_len=64, kv_len=65, batch=3, offset="each"),
    Call(rule="none", sharing="query", q_len=1, kv_len=1, group=3, fallback="self"),
    Call(rule="band", sharing="kv", q_len=200, kv_len=7, fallback=("local", 9), offset="-5", batch=2),
    Call(rule="heads", score="alibi", sharing="kv", kv_block=16, q_len=65, kv_len=200, pack="pack", tile=(48, 64), batch=2),
]  # fmt: skip
MORE_FUSED = [
    Call(
        rule=rule,
        score=("none", "alibi", "softcap", "bias", "temperature")[i % 5],
        sharing=("none", "shared", "kv", "query")[i % 4],
        q_len=q_len,
        kv_len=max(q_len, kv_len) if rule in SQUARE_RULES else kv_len,
        group=GROUPS[i % 4],
        q_block=(1, 7, 64)[i % 3],
        kv_block=(1, 16, 64)[i % 3],
        dtype=(torch.float32, torch.bfloat16, torch.float16)[i % 3],
        tile=(None, (16, 16), (64, 128), (48, 80))[i % 4],
        batch=1 + i % 2,
        fallback=(None, "self")[i % 2],
    )
    for i, (rule, q_len, kv_len) in enumerate(
        (rule, q_len, kv_len)
        for rule in sorted(RULES)
        for q_len, kv_len in ((1, 64), (65, 200), (200, 63), (64, 65), (7, 7))
    )
]


def fused(call: Call, device: torch.device, grads: bool, draws: int) -> None:
    """One kernel, several draws of everything that is a tensor."""
    for seed in range(draws):
        judge(dataclasses.replace(call, seed=2 * seed + 1), device, "flex", grads)


def _name(call: Call) -> str:
    return f"{call.rule}-{call.score}-{call.sharing}-{call.q_len}x{call.kv_len}-g{call.group}-{call.dtype}"


@pytest.mark.parametrize("call", FUSED, ids=_name)
def test_fused_kernels_agree_with_the_reference(call: Call) -> None:
    before = int(compiles)
    with torch.no_grad():
        fused(call, torch.device("cpu"), grads=False, draws=6)
    assert int(compiles) - before <= 1, "only tensors changed, so one kernel must do"


@pytest.mark.slow
@pytest.mark.parametrize("call", MORE_FUSED, ids=_name)
def test_more_fused_kernels_agree_with_the_reference(call: Call) -> None:
    with torch.no_grad():
        fused(call, torch.device("cpu"), grads=False, draws=6)


def test_the_sweep_stays_within_sixty_kernels() -> None:
    assert len(FUSED) + len(MORE_FUSED) <= 60


BLOCKS = (
    (16, 16),
    (32, 64),
    (64, 32),
    (64, 64),
    (128, 128),
    (128, 256),
    (256, 128),
    (256, 256),
    (20, 100),
)
ON_GPU = [
    Call(
        rule=rule,
        score=("none", "alibi", "softcap", "bias", "temperature", "capped alibi")[i % 6],
        sharing=("shared", "kv", "query", "none")[i % 4],
        q_len=q_len,
        kv_len=max(q_len, kv_len) if rule in SQUARE_RULES else kv_len,
        group=GROUPS[(i // 2) % 4],
        q_block=(1, 7, 64)[i % 3],
        kv_block=(1, 64, 16)[i % 3],
        dtype=(torch.bfloat16, torch.float16, torch.float32)[i % 3],
        head_dim=(64, 128, 32)[(i // 3) % 3],
        tile=BLOCKS[i % len(BLOCKS)],
        batch=1 + i % 2,
        pack="pack" if i % 4 == 1 else None,
        fallback=(None, "self", ("local", 40))[i % 3],
        sink=i % 5 == 0,
        offset="each" if rule not in SQUARE_RULES and i % 7 == 3 else "default",
    )
    for i, (rule, q_len, kv_len) in enumerate(
        (rule, q_len, kv_len)
        for rule in sorted(RULES)
        for q_len, kv_len in ((1, 300), (65, 200), (384, 384), (200, 63), (7, 64), (64, 1))
    )
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("grads", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("call", ON_GPU, ids=_name)
def test_fused_kernels_agree_on_a_gpu(call: Call, grads: bool, device: torch.device) -> None:
    """Blocks of 16 to 256; with gradients the backward of narrow blocks runs in wider tiles."""
    with torch.set_grad_enabled(grads):
        fused(call, device, grads, draws=2)


@pytest.mark.gpu
@pytest.mark.parametrize("grads", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("call", ON_GPU[::2], ids=_name)
def test_pieces_agree_on_a_gpu(call: Call, grads: bool, device: torch.device) -> None:
    with torch.set_grad_enabled(grads):
        fused(dataclasses.replace(call, split=1 + call.batch), device, grads, draws=2)


@pytest.mark.gpu
def test_lengths_share_kernels_on_a_gpu(device: torch.device) -> None:
    """A kind whose length varies costs a kernel for the first length and one for the others."""
    before = int(compiles)
    for length in (200, 300, 333, 450):
        judge(Call(rule="streaming", q_len=length, kv_len=length, seed=3), device, "flex", False)
    assert int(compiles) - before <= 2


@pytest.mark.gpu
@settings(max_examples=150, **SETTINGS)
@given(call=calls())
def test_tiles_agree_on_a_gpu(call: Call) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    judge(call, torch.device("cuda"), "tiles")


@pytest.mark.gpu
@settings(max_examples=150, **SETTINGS)
@given(calls(), SELECTED)
def test_backends_without_tiles_agree_on_a_gpu(call: Call, sharing: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    judge(call, torch.device("cuda"), "dense")
    judge(selecting(call, sharing), torch.device("cuda"), "gather")
