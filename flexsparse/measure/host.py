"""What the host does for a call: around the compiled function, at the front door, and the first time.

    python -m flexsparse.measure.host

prints the median µs of each; the first calls stand in processes of their own, with empty caches of kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsparse.attention import attention
from flexsparse.backends import Work
from flexsparse.backends.routes import arguments, kernel_of
from flexsparse.checking import check
from flexsparse.choice import BackendName
from flexsparse.errors import BackendError
from flexsparse.layout import Layout
from flexsparse.masks.causal import Causal
from flexsparse.masks.sliding_window import SlidingWindow
from flexsparse.plan import Plan
from flexsparse.planning import make_plan
from flexsparse.selection import Selection

QKV = tuple[Tensor, Tensor, Tensor]
_CALLS = 300


def host_us(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Median µs of each call until it returns; the device is given time to keep up.

    In turns: whatever else a box does falls on all alike.
    """
    took: list[list[float]] = [[] for _ in calls]
    for i in range(_CALLS):
        if i % 20 == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)
        for call, times in zip(calls, took, strict=True):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
    return [1e6 * sorted(times)[len(times) // 2] for times in took]


def inputs(device: torch.device, dtype: torch.dtype) -> QKV:
    """So short that the device waits for the host."""
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, h, 512, 64, device=device, dtype=dtype, generator=draw) for h in (4, 2, 2)
    )
    return q, k, v


def selection(device: torch.device) -> Selection:
    indices = torch.arange(4, device=device)[:, None].expand(1, 2, 4, 2) - torch.arange(
        2, device=device
    )
    return Selection.from_indices(
        indices, kv_len=512, q_len=512, kv_block=128, q_block=128, out_of_range="drop"
    )


def around(device: torch.device, dtype: torch.dtype, backend: BackendName) -> list[dict[str, Any]]:
    """Rows of ``what``, ``us`` and, where the bare compiled function is known, ``over`` it."""
    q, k, v = inputs(device, dtype)
    found: list[dict[str, Any]] = []
    rule = Causal() & SlidingWindow(200)
    cases: dict[str, Selection | None] = {"rule": None, "rule and selection": selection(device)}
    with torch.no_grad():
        for name, select in cases.items():
            plan = make_plan(q, k, v, rule=rule, select=select, backend=backend)
            layout = plan.layout(select)
            plan.run(q, k, v, layout)
            calls: dict[str, Callable[[], object]] = {
                "plan.run": partial(plan.run, q, k, v, layout),
                "attention": partial(attention, q, k, v, rule=rule, select=select, backend=backend),
            }
            bare = _bare(plan, layout, (q, k, v))
            took = host_us([*calls.values(), *([] if bare is None else [bare])], device)
            for of, us in zip(calls, took, strict=False):
                over = None if bare is None else us - took[-1]
                found.append({"what": f"{of}, {name}", "us": us, "over": over})
    return found


def _bare(plan: Plan, layout: Layout, qkv: QKV) -> Callable[[], object] | None:
    """The compiled function alone, by torch's guards, with its arguments at hand; None where it is not
    known."""
    q, k, v = (plan.address.pack(x, name) for x, name in zip(qkv, ("q", "k", "v"), strict=True))
    work = Work(q, k, v, layout, None, [], plan.scale, False, False)
    kernel, given = kernel_of(work, plan.backend), arguments(work)
    return None if kernel is None else partial(kernel, *given)


# Kinds of calls, as (backend, whether with backward); each is compiled by itself.
FIRST: dict[str, tuple[BackendName, bool]] = {
    "rule": ("auto", False),
    "rule by flex": ("flex", False),
    "rule and backward": ("auto", True),
    "blocks and backward": ("auto", True),
    "blocks by flex and backward": ("flex", True),
    "packed tokens": ("flex", False),
    "packed tokens and backward": ("flex", True),
    "gather and backward": ("gather", True),
    "decode": ("auto", False),
    "score and backward": ("auto", True),
}


def first_s(kind: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of the first call of a kind in this process, and whether its answer is right."""
    backend, grads = FIRST[kind]
    q, k, v = (x.requires_grad_(grads) for x in inputs(device, dtype))
    options: dict[str, Any] = {"rule": Causal() & SlidingWindow(200), "backend": backend}
    if kind.startswith("blocks"):
        options["select"] = selection(device)
    elif kind.startswith(("packed", "gather")):
        own = torch.arange(512, device=device) // 64
        indices = torch.stack([own, torch.zeros_like(own)], -1).expand(1, 2, -1, -1)
        options["select"] = Selection.from_indices(indices, kv_len=512, q_len=512, kv_block=64)
        options["pack"] = "pack" if kind.startswith("packed") else None
    elif kind == "decode":
        q = q[:, :, -1:].contiguous()
    elif kind.startswith("score"):
        options["score"] = lambda s, b, h, q_idx, kv_idx: s + (kv_idx - q_idx) * 0.01
    torch.empty(1, device=device)
    begun = time.perf_counter()
    out = attention(q, k, v, **options)
    if grads:
        torch.autograd.grad(out.sum(), (q, k, v))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - begun
    report = check(*(x.detach() for x in (q, k, v)), grads=grads, **options)
    plan = make_plan(q, k, v, **options)
    return {"kind": kind, "by": plan.backend, "s": took, "ok": report.ok, "detail": report.detail}


def cold(kinds: Sequence[str], at_once: int = 5) -> list[dict[str, Any]]:
    """`first_s` of each kind in a process with empty caches of kernels, some at a time.

    Python's own modules are compiled, as an installation leaves them: by a process of the same kind that
    goes before.
    """
    with ThreadPoolExecutor(at_once) as pool, tempfile.TemporaryDirectory() as modules:
        list(pool.map(lambda kind: _alone(kind, modules), kinds))
        return list(pool.map(lambda kind: _alone(kind, modules), kinds))


def _alone(kind: str, modules: str) -> dict[str, Any]:
    """`first_s` in a process of its own, which finds Python's ``modules`` but no kernel."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch", "TRITON_CACHE_DIR": f"{folder}/triton",
            "PYTHONPYCACHEPREFIX": modules, "PYTHONDONTWRITEBYTECODE": "",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "flexsparse.measure.host", kind],
            env=os.environ | caches, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        return {"kind": kind, "by": None, "s": None, "ok": False, "detail": done.stderr[-300:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(asked: Sequence[str]) -> None:
    on_cuda = torch.cuda.is_available()
    device, dtype = (
        (torch.device("cuda"), torch.bfloat16) if on_cuda else (torch.device("cpu"), torch.float32)
    )
    if asked:
        print(json.dumps(first_s(asked[0], device, dtype)))
        return
    names: tuple[BackendName, ...] = ("flash", "flex") if on_cuda else ("tiles",)
    for backend in names:
        try:
            rows = around(device, dtype, backend)
        except BackendError as why:
            print(f"{backend}: {why}")
            continue
        for row in rows:
            over = (
                ""
                if row["over"] is None
                else f", {row['over']:.0f} over the compiled function by its guards"
            )
            print(f"{backend}: {row['what']}: {row['us']:.0f} us{over}")
    for row in cold(list(FIRST)):
        took = "failed" if row["s"] is None else f"{row['s']:.1f} s"
        right = "right" if row["ok"] else f"WRONG: {row['detail']}"
        print(f"first call, {row['kind']} ({row['by']}): {took}, {right}")


if __name__ == "__main__":
    main(sys.argv[1:])
