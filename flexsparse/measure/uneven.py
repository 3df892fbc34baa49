"""What uneven work costs: beside as much of it spread evenly, padded to the longest, a call a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsparse.choice import BackendName, Pack
from flexsparse.device.clock import free_bytes
from flexsparse.measure.contender import UnfitError
from flexsparse.measure.conversion import Conversion, conversion
from flexsparse.measure.cost import first_line
from flexsparse.measure.delivery import modes
from flexsparse.measure.problem import Problem
from flexsparse.measure.timed import MODES, QKV, Timed, by_kernel, fastest, sdpa

Found = dict[str, Any]


def uneven(
    made: Conversion, attention: Found, seed: int, backend: BackendName, pack: Pack | None
) -> Found:
    """By mode: ms at the ``uniform`` rate, which is the time of evenly spread work times the ratio of
    pairs; ``over_uniform`` of kernel and total; ``padded`` and ``per_request`` as ms, who gave them, and
    how many times ours, or a ``reason``."""
    problem = made.problem
    assert problem.even is not None
    even = conversion(problem.even, attention=True, seed=seed, backend=backend, pack=pack)
    share = attention["logical_pairs"] / even.budget.logical_pairs
    found: Found = {"pairs_of_even": share, "said": _said(problem)}
    for mode in modes(made):
        timed = MODES[mode]
        assert even.qkv is not None
        times = attention[mode]["time_ms"]
        uniform = {
            "kernel": share * timed(even.attend, even.qkv, problem.device),
            "total": share * timed(even.attend_anew, even.qkv, problem.device),
        }
        over = {part: times[part] / ms for part, ms in uniform.items()}
        found[mode] = {"uniform_ms": uniform, "over_uniform": over}
    # Their tensors must not lie beside padded ones.
    del even
    for mode in modes(made):
        ours, timed = attention[mode]["time_ms"]["total"], MODES[mode]
        found[mode]["padded"] = _beside(partial(_padded, made, timed, seed, backend, pack), ours)
        if problem.lengths is not None:
            found[mode]["per_request"] = _beside(partial(_per_request, made, timed), ours)
    return found


def _said(problem: Problem) -> str:
    if problem.lengths is None:
        return "as many blocks a row for all rows"
    even = problem.even
    assert even is not None and even.lengths is not None
    return (
        f"{len(problem.lengths)} requests of {min(problem.lengths)} to {max(problem.lengths)}; evenly "
        f"{len(even.lengths)} of {even.lengths[0]}"
    )


def _beside(measure: Callable[[], tuple[float, str]], ours: float) -> Found:
    found: Found = {"ms": None, "by": None, "times_ours": None, "reason": None}
    try:
        ms, by = measure()
        return found | {"ms": ms, "by": by, "times_ours": ms / ours}
    except (UnfitError, torch.OutOfMemoryError) as why:
        return found | {"reason": str(why) if isinstance(why, UnfitError) else first_line(why)}


def _padded(
    made: Conversion, timed: Timed, seed: int, backend: BackendName, pack: Pack | None
) -> tuple[float, str]:
    """Every row keeps as many blocks as the longest; every request is as long as the longest."""
    problem = made.problem
    if problem.padded is not None:
        padded = conversion(problem.padded, attention=True, seed=seed, backend=backend, pack=pack)
        assert padded.qkv is not None and padded.plan is not None
        return timed(padded.attend_anew, padded.qkv, problem.device), padded.plan.backend
    assert problem.lengths is not None
    heads, kv_heads = problem.heads
    shape = (len(problem.lengths), max(problem.lengths), problem.head_dim)
    # q, k, v and out; in training each again as a gradient, and what flows in.
    copies = 2 * (heads + kv_heads) + (3 * heads + 2 * kv_heads if problem.training else 0)
    needed = copies * shape[0] * shape[1] * shape[2] * problem.dtype.itemsize
    if needed > (free := free_bytes(problem.device)):
        raise UnfitError(
            f"{shape[0]} requests of {shape[1]} take {needed / 2**30:,.0f} GiB, and "
            f"{free / 2**30:,.0f} are free"
        )
    draw = torch.Generator(problem.device).manual_seed(seed)
    q, k, v = (
        torch.randn(
            shape[0], h, *shape[1:], dtype=problem.dtype, device=problem.device, generator=draw
        )
        for h in (heads, kv_heads, kv_heads)
    )
    attend = sdpa(True, problem.heads)
    return fastest(by_kernel(attend, (q, k, v), problem.device, timed))


def _per_request(made: Conversion, timed: Timed) -> tuple[float, str]:
    """A causal call of torch's dense attention for each request, one after the other."""
    lengths, dense = made.problem.lengths, sdpa(True, made.problem.heads)
    assert lengths is not None and made.qkv is not None
    qkv: QKV = made.qkv

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        return tuple(dense(*part) for part in parts)

    return fastest(by_kernel(attend, qkv, made.problem.device, timed))
