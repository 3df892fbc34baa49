"""The ways to run a problem, each timed beside what was predicted: is the chosen one the quickest?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flexsparse.choice import UNTILED, BackendName, Pack, pack_of, unpacked
from flexsparse.device import ceilings
from flexsparse.device.clock import Call, captured_ms, device_ms
from flexsparse.errors import BackendError, LayoutError
from flexsparse.measure.cost import first_line
from flexsparse.measure.problem import Problem
from flexsparse.measure.timed import QKV, training
from flexsparse.overlap import heights
from flexsparse.plan import Plan
from flexsparse.planning import make_plan
from flexsparse.reference import reference
from flexsparse.ways import Way, foreseen, ways, weighs

Found = dict[str, Any]
Size = tuple[int, int]
Clock = Callable[[Call, torch.device], float]
# What is asked of make_plan.
Asked = tuple[BackendName, Pack | None, Size | None]

# Of tiles whose rows are single heads; and keys of any tile.
_ROWS = (64, 128, 256)
_KEYS = (64, 128)
# In a shorter call the host's launches may be seen; a longer one is timed once.
_SHORT_MS, _LONG_MS = 5.0, 30.0


def brief_ms(call: Call, device: torch.device) -> float:
    """Median ms of a few calls that have run before, in a CUDA graph where they are short."""
    if device.type != "cuda":
        return device_ms(call, device)
    from triton.testing import do_bench

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    once = float(begin.elapsed_time(end))
    if once > _LONG_MS:
        return once
    eager = float(do_bench(call, warmup=5, rep=20, return_mode="median"))
    if eager > _SHORT_MS:
        return eager
    captured = captured_ms(call)
    return eager if captured is None else captured


def once(call: Call, device: torch.device) -> float:
    """Calls without looking at the clock: what is compiled is compiled then."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1.0


def tried(problem: Problem, seed: int, rows: int, *, every: bool, clock: Clock = brief_ms) -> Found:
    """``chosen`` and, with ``every``, the rest of ``ways``: a backend, laying of heads and tile each, with
    ``ms`` of one run over a finished layout, forward or forward and backward, ``predicted_ms``, the
    ``job`` that it was reckoned from, and how far its output is from that of the chosen one.

    ``check`` holds the output of the chosen one against the reference on ``rows`` query rows; ``wrong`` says what is wrong. ``refused`` are ways
    that do not run, with the reason.
    """
    qkv = problem.qkv(seed)
    plan = make_plan(*qkv, rule=problem.rule, select=problem.select(), tile=problem.tile)
    out = _forward(plan, qkv)
    said = _compared(problem, qkv, out, rows, seed)
    weighed = _weighed(problem, plan, qkv)
    found: Found = {
        "every": every,
        "mode": "training" if problem.training else "forward",
        "plan": str(plan),
        "box": ceilings(problem.device, problem.dtype)._asdict(),
        "check": said,
        "ways": [],
        "refused": [],
    }
    chosen = _of(plan)
    own = _timed(problem, plan, qkv, weighed, clock)
    wrong = None if said["ok"] else f"{_named(plan)} is {said['error']:.3g} from the reference"
    found["ways"].append(own | {"difference": 0.0})
    seen = {chosen}
    for asked in _every(problem, qkv, chosen) if every else ():
        try:
            other = _planned(problem, qkv, asked)
            if (named := _of(other)) in seen:
                continue
            seen.add(named)
            line = _timed(problem, other, qkv, weighed, clock)
            line["difference"] = float((_forward(other, qkv) - out).abs().max())
        except (BackendError, LayoutError):
            continue
        except Exception as error:  # torch's or Triton's: no way to run the problem
            found["refused"].append({"asked": list(asked), "reason": first_line(error)})
            continue
        # Both may be off by the budget, to either side.
        if line["difference"] > 2 * said["budget"]:
            wrong = f"{_named(other)} is {line['difference']:.3g} from what was checked"
        found["ways"].append(line)
    best = min(found["ways"], key=lambda line: line["ms"])
    return found | {
        "chosen": own,
        "best": best,
        "over_best": own["ms"] / best["ms"],
        "wrong": wrong,
    }


def _compared(problem: Problem, qkv: QKV, out: Tensor, rows: int, seed: int) -> Found:
    """Some query rows of an output beside the reference in fp64, and beside the same in its precision."""
    q, k, v = (x.detach() for x in qkv)
    draw = torch.Generator().manual_seed(seed)
    at = torch.randperm(problem.grid.q_len, generator=draw)[:rows].sort().values.to(q.device)
    true, plain = (
        reference(q, k, v, rule=problem.rule, select=problem.select(), rows=at, dtype=dtype).out
        for dtype in (torch.float64, q.dtype)
    )
    error, usual = (float((x.double() - true).abs().max()) for x in (out[:, :, at], plain))
    # A rounding of the output, and twice what plain arithmetic in this precision is off.
    budget = 2 * usual + torch.finfo(q.dtype).eps * float(true.abs().max())
    return {
        "rows": len(at), "error": error, "plain_error": usual, "budget": budget, "ok": error <= budget
    }  # fmt: skip


def _planned(problem: Problem, qkv: QKV, asked: Asked) -> Plan:
    backend, pack, tile = asked
    return make_plan(
        *qkv, rule=problem.rule, select=problem.select(), backend=backend, pack=pack, tile=tile
    )


def _every(problem: Problem, qkv: QKV, chosen: tuple[str, Pack, Size]) -> Iterator[Asked]:
    """Each backend over each tile and laying; those that visit no tiles, once."""
    heads, kv_heads = problem.heads
    names: tuple[BackendName, ...] = ("flash", "flex")
    # On CPU FlexAttention compiles for every length, and is never chosen.
    for name in names if problem.device.type == "cuda" else ("tiles",):
        for keys in _KEYS:
            for rows in _ROWS:
                yield name, unpacked(*qkv, problem.select()), (rows, keys)
            for rows in heights(heads // kv_heads) if kv_heads < heads else ():
                yield name, "pack", (rows, keys)
    yield "gather", None, None
    yield "dense", None, None
    yield "decode", None, None


def _of(plan: Plan) -> tuple[str, Pack, Size]:
    return plan.backend, pack_of(plan.address), plan.tile


def _named(plan: Plan) -> str:
    backend, pack, (rows, keys) = _of(plan)
    return f"{backend} over {rows}x{keys}, {pack}"


def _timed(problem: Problem, plan: Plan, qkv: QKV, weighed: list[Way], clock: Clock) -> Found:
    """A way on the clock, and what was predicted for it."""
    backend, pack, tile = _of(plan)
    layout = plan.layout(problem.select())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plan.run(q, k, v, layout).out

    if problem.training:
        ms = _ms(training(attend, qkv), clock, problem.device)
    else:
        with torch.no_grad():
            q, k, v = (x.detach() for x in qkv)
            ms = _ms(lambda: attend(q, k, v), clock, problem.device)
    way = _way(problem, plan, qkv, weighed)
    return {
        "backend": backend,
        "pack": pack,
        "tile": list(tile),
        "ms": ms,
        "predicted_ms": way and way.ms,
        "job": way and way.job and _plain(way),
    }


def _ms(call: Call, clock: Clock, device: torch.device) -> float:
    call()
    return clock(call, device)


def _weighed(problem: Problem, plan: Plan, qkv: QKV) -> list[Way]:
    """What the plan was chosen from."""
    call, select = plan.call(grads=problem.training), problem.select()
    if not weighs(call):
        return []
    base = unpacked(*qkv, select)
    tile = None if problem.tile is None else (problem.tile, problem.tile)
    return ways(qkv, call, select, problem.grid, base, tile=tile)


def _way(problem: Problem, plan: Plan, qkv: QKV, weighed: list[Way]) -> Way | None:
    """The prediction for a plan, as the chooser would make it."""
    backend, pack, tile = _of(plan)
    if not predicts(problem.device):
        return None
    call, select = plan.call(grads=problem.training), problem.select()
    named = (backend,) if backend in UNTILED else (backend, pack, tile)
    found = [way for way in weighed if (way.backend, way.pack, way.tile)[: len(named)] == named]
    if not found and weighed and select is not None and backend in ("flash", "flex"):
        base = unpacked(*qkv, select)
        asked = ways(qkv, call, select, problem.grid, base, pack=pack, tile=tile)
        found = [way for way in asked if way.backend == backend]
    if not found and not weighed and plan.first is not None:
        seen = foreseen(call, plan.first, plan.backend, pack)
        found = [way for way in seen if way.backend == backend]
    return found[0] if found else None


def predicts(device: torch.device) -> bool:
    """Whether the cost model speaks of a device."""
    return device.type == "cuda"


def _plain(way: Way) -> Found:
    """A job as JSON has it."""
    assert way.job is not None
    counts = way.job.counts
    kind = {"kind": type(counts).__name__}
    return way.job._asdict() | {"counts": kind | counts._asdict(), "dims": list(way.job.dims)}


def _forward(plan: Plan, qkv: QKV) -> Tensor:
    with torch.no_grad():
        q, k, v = (x.detach() for x in qkv)
        return plan.run(q, k, v).out
