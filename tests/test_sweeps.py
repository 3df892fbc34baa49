"""Many lengths and parameters in one process: few kernels serve them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flexsparse as fs
from flexsparse.backends import compiled, flash, flex
from flexsparse.choice import BackendName
from flexsparse.device import compiles
from flexsparse.masks import Causal, SlidingWindow

# Whole tiles and not; a sequence of a single tile is a kind of its own, as torch knows sizes of 1.
LENGTHS = [129 + 97 * i for i in range(30)] + [256 * i for i in range(1, 11)]
WINDOWS = [1, 2, 7, 32, 63, 64, 65, 128, 200, 1000]


def call(length: int, backend: BackendName, device: torch.device, selected: bool) -> dict[str, Any]:
    """q, k, v and what is chosen of a length."""
    q, k, v = torch.randn(3, 1, 2, length, 64, device=device, dtype=torch.bfloat16)
    options: dict[str, Any] = {"backend": backend}
    if backend == "decode":
        q = q[:, :, -1:]
    if selected:
        rows = -(-q.shape[2] // 128)
        own = torch.arange(rows, device=device) + (-(-length // 128) - rows)
        indices = torch.stack([own, own // 2], -1).expand(1, 2, -1, -1)
        options["select"] = fs.Selection.from_indices(
            indices, kv_len=length, q_len=q.shape[2], kv_block=128, q_block=128
        )
    return {"qkv": (q, k, v), "options": options}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "grads", "selected"),
    [
        ("flex", False, False), ("flex", True, False), ("flex", False, True), ("flash", False, False),
        ("flash", True, False), ("decode", False, False), ("decode", False, True),
        ("gather", True, True),
    ],
)  # fmt: skip
def test_a_sweep_takes_three_kernels(
    backend: BackendName, grads: bool, selected: bool, device: torch.device
) -> None:
    if backend == "flash" and not flash.installed():
        pytest.skip("flash-attn-4 is not installed")
    before, traced = int(compiles), counters["stats"]["unique_graphs"]
    for length in LENGTHS:
        given = call(length, backend, device, selected)
        qkv = [x.requires_grad_(grads) for x in given["qkv"]]
        for window in WINDOWS:
            rule = Causal() & SlidingWindow(window)
            out = fs.attention(*qkv, rule=rule, **given["options"])
            if grads:
                torch.autograd.grad(out.sum(), qkv)
    # What judges the tiles of a rule that is built again and again is another's kernel.
    made = [kind for kind in compiles.kinds[before:] if not kind.startswith("judge/")]
    judges = len(compiles.kinds[before:]) - len(made)
    assert len(made) <= 3, made
    assert judges <= 1
    # Nor has torch compiled any of them again by itself.
    assert counters["stats"]["unique_graphs"] - traced <= 3 + judges
    for length in LENGTHS[::13]:
        given = call(length, backend, device, selected)
        report = fs.check(
            *given["qkv"],
            rule=Causal() & SlidingWindow(200),
            grads=grads,
            rows=16,
            **given["options"],
        )
        assert report.ok, report.detail


def test_on_cpu_nothing_is_compiled() -> None:
    before = int(compiles)
    for length in (1, 7, 63, 64, 65, 127, 128, 129, 200):
        q, k, v = torch.randn(3, 1, 2, length, 16)
        for window in WINDOWS:
            rule = Causal() & SlidingWindow(window)
            out = fs.attention(q, k, v, rule=rule)
            close = fs.reference(q, k, v, rule=rule).out
            torch.testing.assert_close(out.double(), close, atol=1e-5, rtol=0)
    assert int(compiles) == before


def test_sizes_that_follow_the_length_vary_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lengths of as many tiles do not make a kernel that the third cannot use."""
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "_first_sizes", {})
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    made = []
    for length in (300, 301, 500, 900):
        tiles = -(-length // 128)
        # q and its list of tiles, as a device other than the CPU would have them.
        sizes = [(1, length), (1, tiles)]
        tensors = [torch.empty(n, device="meta") for n in sizes]
        _, fresh = compiled._kept(
            ("kind",), tensors, lambda: lambda *call: call, "", (), frozenset({1, 3})
        )
        made.append(fresh is not None)
    assert made == [True, True, False, False]


@pytest.mark.parametrize("selected", [False, True])
def test_lists_of_a_sweep_make_few_kinds(selected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for the first length, one for all others in whole tiles, and one for the rest."""
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "_first_sizes", {})
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    for length in LENGTHS:
        tiles = -(-length // 128)
        # Lists as a GPU has them: of two candidates a row, or as wide as there are tiles.
        width = 2 if selected else tiles
        lists = [torch.empty((1, 1, tiles, width)[:n], device="meta") for n in (3, 4, 3, 4)]
        qkv = [torch.empty(1, 2, length, 64, device="meta") for _ in range(3)]
        compiled._kept(
            ("kind",), [*qkv, *lists], lambda: lambda *call: call, "", (length % 128 == 0,),
            flex._lengths(lists, selected),
        )  # fmt: skip
    assert len(compiled._kernels) == 3
