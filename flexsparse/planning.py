"""A call judged and decided: what each keyword may be, and the plan they amount to."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.ahead import Element, Terms, look_ahead
from flexsparse.arguments import (
    Empty,
    Fallback,
    check_cluster,
    check_empty,
    check_fallback,
    check_flag,
    check_scale,
    check_selection,
    check_sink,
    check_split,
    tile_size,
)
from flexsparse.backends import Backend, Call, member
from flexsparse.choice import (
    ADDRESSES,
    BACKENDS,
    DEFAULT_TILE,
    UNTILED,
    BackendName,
    Pack,
    asked_for,
    choose_address,
    choose_backend,
    choose_tile,
    holding_several,
    laid_alike,
    ordered,
    pack_of,
    refuses_order,
    remarks,
    unpacked,
)
from flexsparse.errors import LayoutError, ShapeError
from flexsparse.fitting import checked_qkv
from flexsparse.grid import Grid
from flexsparse.lengths import choose_cuts
from flexsparse.occupancy import on_device_only
from flexsparse.plan import Plan
from flexsparse.program import MaskProgram, ScoreProgram, mask_program, score_program
from flexsparse.quicker import timed_ms
from flexsparse.rules import MaskMod, as_rule
from flexsparse.scores import ScoreMod, as_score
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector
from flexsparse.ways import Way, foreseen, ways, weighs

_SPREAD = "single keys: an own kernel loads a word of membership for eight pairs, FlexAttention's one for each"


class Shared(TypedDict, total=False):
    """The keywords that attention, make_plan, reference and check share."""

    rule: MaskMod | None
    select: Selection | None
    score: ScoreMod | None
    scale: float | None
    q_offset: int | Tensor | None
    sink: Tensor | None
    fallback: Fallback


class Choices(TypedDict, total=False):
    """The keywords of attention and make_plan alone."""

    empty: Empty
    sanitize: bool
    backend: BackendName
    pack: Pack | None
    tile: int | tuple[int, int] | None
    split: int | Literal[False] | None
    cluster: bool | None


def make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: MaskMod | None = None,
    select: Selection | Selector | None = None,
    score: ScoreMod | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    sink: Tensor | None = None,
    fallback: Fallback = None,
    empty: Empty = "zero",
    sanitize: bool = False,
    backend: BackendName = "auto",
    pack: Pack | None = None,
    tile: int | tuple[int, int] | None = None,
    split: int | Literal[False] | None = None,
    cluster: bool | None = None,
) -> Plan:
    """Decides how calls like this one run, and makes the first layout.

    ``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]``, ``v [B, Hkv, S, Dv]``. ``backend``, ``pack`` (how heads
    are laid), ``tile``, ``split`` and ``cluster`` override what would be chosen, as in `attention`. Where
    query heads are packed beside short rows of candidates, what neighbours share is measured, on the
    device.
    ``backend="measured"`` times the two best ways that were predicted, once for a kind of call.
    """
    q, k, v = checked_qkv(q, k, v)
    grid = Grid(q.shape[2], k.shape[2], q_offset=q_offset, batch=q.shape[0])
    heads = (q.shape[1], k.shape[1])
    ruled, scored = as_rule(rule), as_score(score)
    selector = select if isinstance(select, Selector) else None
    selection = selector.select(q, k, grid, ruled) if selector is not None else select
    if selection is not None:
        selection = _judged(selection, grid, heads, q.device)
    reach, checked_scale = check_fallback(fallback), check_scale(scale, q.shape[3])
    sink, cuts_at = check_sink(sink, heads[0], q.device), check_split(split)
    empty, sanitize = check_empty(empty), check_flag("sanitize", sanitize)
    no_order = refuses_order(selection, grid, reach is not None, empty, sanitize)
    if check_cluster(cluster) and no_order is not None:
        raise LayoutError(f"cluster=True lays no rows in order here: {no_order}; leave cluster out")
    cluster = cluster if no_order is None else False

    reasons: list[str] = []
    address = choose_address(q, k, v, selection, pack, backend, reasons)
    program = mask_program(address, grid, ruled, selection, reach)
    score_code = score_program(address, grid, scored)
    call = _call((q, k, v), program, score_code, lse=sink is not None)
    wanted = DEFAULT_TILE if tile is None else tile_size(tile)
    if backend == "flex" and pack is None and member.serves(call, wanted):
        # Whose kernel takes heads with rows of their own.
        reasons = []
        address = ADDRESSES[unpacked(q, k, v, selection)](*heads)
        call = replace(call, program=replace(call.program, address=address))

    weighed = []
    if backend in ("auto", "measured") and weighs(call):
        weighed = _weighed((q, k, v), call, selection, grid, pack, tile, cluster, reasons)
    if backend == "measured" and len(weighed) > 1:
        tried = [
            make_plan(
                q, k, v, rule=ruled, select=selection, score=scored, scale=scale, q_offset=q_offset,
                sink=sink, fallback=fallback, empty=empty, sanitize=sanitize,
                backend=way.backend, pack=way.pack, tile=way.tile, split=split,
                cluster=way.ordered,
            )
            for way in weighed[:2]
        ]  # fmt: skip
        return replace(_quickest(tried, weighed, (q, k, v), call), selector=selector)
    if weighed:
        decided = _by_weight(weighed, heads, pack, tile, call)
    else:
        # A tile that was asked for is kept, and what may be trained later can be.
        tiled = tile is not None or any(x.requires_grad for x in (q, k, v))
        chosen = choose_backend(backend, call, reasons, tiles_on_cpu=tiled)
        laid = laid_alike(selection) if cluster and selection is not None else selection
        size = choose_tile(tile, grid, address, laid, chosen, call, reasons)
        decided = _Decided(chosen, address, size, bool(cluster), reasons)
    # A score is asked of rows as they are.
    score_code = call.score and replace(call.score, address=decided.address)
    decided = _in_order(decided, selection, tile, call)
    chosen, address, reasons = decided.backend, decided.address, decided.reasons
    terms = Terms(
        replace(call.program, address=address),
        grid,
        decided.tile,
        q.device,
        empty,
        sanitize,
        Element(q.shape[3], v.shape[3], q.dtype.itemsize, given=True),
        None if call.grads and chosen.name not in UNTILED else 0,
    )
    plan = Plan(
        terms=terms,
        shape=(*heads, q.shape[3], v.shape[3]),
        dtype=q.dtype,
        rule=ruled,
        score=scored,
        selector=selector,
        backend=chosen.name,
        scale=checked_scale,
        sink=sink,
        score_program=score_code,
        reasons=tuple(reasons),
        ahead=look_ahead(terms),
        first=None,
    )
    first = plan.measured(plan.layout(selection))
    object.__setattr__(plan, "first", first)
    if not weighed and not on_device_only(q.device):
        reasons = [*_foreseen(call, plan), *reasons]
    cuts = choose_cuts(first, chosen, call, cuts_at, reasons)
    if cuts is not None:
        # Room for columns may have been measured.
        plan = replace(plan, terms=plan.terms._replace(cuts=cuts), first=first.cut(cuts))
    object.__setattr__(plan, "reasons", tuple(reasons))
    return plan


class _Decided(NamedTuple):
    """How a call runs: rows of alike queries are laid beside each other with ``ordered``."""

    backend: Backend
    address: Identity
    tile: tuple[int, int]
    ordered: bool
    reasons: list[str]


def _call(
    qkv: tuple[Tensor, Tensor, Tensor],
    program: MaskProgram,
    score: ScoreProgram | None,
    *,
    lse: bool,
) -> Call:
    q, _, v = qkv
    learned = score is not None and any(t.requires_grad for t in score.score.tensors)
    grads = torch.is_grad_enabled() and (learned or any(x.requires_grad for x in qkv))
    dims = (q.shape[3], v.shape[3])
    return Call(q.device, q.dtype, *dims, q.shape[2], grads, lse, grads and learned, program, score)


def _quickest(
    tried: list[Plan], weighed: list[Way], qkv: tuple[Tensor, Tensor, Tensor], call: Call
) -> Plan:
    """The quicker of two plans, by the clock."""
    took = timed_ms(tried, *qkv)
    best, other = sorted(range(2), key=lambda i: took[i])
    said = [f"{weighed[i]} predicted, {took[i]:.3g} ms measured" for i in (best, other)]
    said += remarks(BACKENDS[weighed[best].backend], call)
    said += [_SPREAD] if _SPREAD in tried[best].reasons else []
    return replace(tried[best], reasons=tuple(said))


def _by_weight(
    weighed: list[Way],
    heads: tuple[int, int],
    pack: Pack | None,
    tile: int | tuple[int, int] | None,
    call: Call,
) -> _Decided:
    """The first of the ways that were weighed."""
    best = weighed[0]
    backend = BACKENDS[best.backend]
    reasons = [f"{best} predicted", *(f"next {way}" for way in weighed[1:3])]
    reasons += remarks(backend, call)
    reasons += [] if pack is None else [f"heads were asked to be laid by pack={pack!r}"]
    reasons += [] if tile is None else asked_for(tile_size(tile), backend)
    return _Decided(backend, ADDRESSES[best.pack](*heads), best.tile, best.ordered, reasons)


def _in_order(
    decided: _Decided, select: Selection | None, tile: int | tuple[int, int] | None, call: Call
) -> _Decided:
    """Rows laid in order where that was decided; and what is to be said of single keys."""
    backend, address, size, in_order, reasons = decided
    if in_order:
        if tile is None:
            size = holding_several(size, address, select, backend, call, reasons)
        address = ordered(address, select, size, backend, reasons)
    own_rows = pack_of(address) != "pack" and not in_order
    if backend.name == "flex" and own_rows and member.serves(call, size):
        reasons.append(_SPREAD)
    return _Decided(backend, address, size, in_order, reasons)


def _foreseen(call: Call, plan: Plan) -> list[str]:
    """What the plan would take, and the next best way, where tiles were not weighed but are known."""
    if plan.device.type != "cuda" or plan.first is None:
        return []
    try:
        found = foreseen(call, plan.first, plan.backend, pack_of(plan.address))
    except torch.OutOfMemoryError:
        return []
    own = [way for way in found if way.backend == plan.backend]
    return [f"{way} predicted" for way in own] + [f"next {w}" for w in found if w not in own]


def _judged(select: object, grid: Grid, heads: tuple[int, int], device: torch.device) -> Selection:
    found = check_selection(select, grid, heads)
    if found.device != device:
        raise ShapeError(
            f"select is on {found.device} but q on {device}: move it with select.to(device)"
        )
    return found


def _weighed(
    qkv: tuple[Tensor, Tensor, Tensor],
    call: Call,
    select: Selection | None,
    grid: Grid,
    pack: Pack | None,
    tile: int | tuple[int, int] | None,
    cluster: bool | None,
    why: list[str],
) -> list[Way]:
    """The ways to run the call, where there is memory to measure what the device can do."""
    asked = None if tile is None else tile_size(tile)
    try:
        base = unpacked(*qkv, select)
        return ways(qkv, call, select, grid, base, pack=pack, tile=asked, cluster=cluster)
    except torch.OutOfMemoryError:
        why.append("not weighed: no memory is left to measure what this device can do")
        return []
