"""Decisions: which address, tile and backend a call gets, made once, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from flexsparse.address import FoldedHeads, Identity, folds_without_copy
from flexsparse.arguments import (
    Empty,
    Fallback,
    check_empty,
    check_fallback,
    check_qkv,
    check_scale,
    check_selection,
    check_sink,
    tile_size,
)
from flexsparse.backends import Backend, Call, Work, flex, tiles
from flexsparse.errors import ArgumentError, BackendError, EmptyRowError, LayoutError, ShapeError
from flexsparse.grid import Grid
from flexsparse.layout import Element, Layout, fill
from flexsparse.merge import Partial, with_sink
from flexsparse.parameters import describe
from flexsparse.program import MaskProgram, ScoreProgram, mask_program, score_program
from flexsparse.rules import MaskMod, MaskRule, as_rule
from flexsparse.scores import ScoreMod, ScoreRule, as_score
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector

BackendName = Literal["auto", "flex", "tiles"]
Pack = Literal["identity", "fold"]
_BACKENDS: dict[str, Backend] = {"flex": flex, "tiles": tiles}
_DEFAULT_TILE = (128, 128)


class Result(NamedTuple):
    """``out [B, Hq, Q, Dv]``, ``lse [B, Hq, Q]`` where asked for, and what computed them."""

    out: Tensor
    lse: Tensor | None
    plan: Plan
    layout: Layout

    @property
    def partial(self) -> Partial:
        """For `merge`; needs ``return_lse=True``."""
        if self.lse is None:
            raise ArgumentError("this result has no lse: run the plan with return_lse=True")
        return Partial(self.out, self.lse)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What was decided for one shape and kind of call. ``print(plan)`` says it and why.

    ``plan.layout(selection)`` makes the layout of the next selection, on the device alone;
    ``plan.run(q, k, v, layout)`` decides nothing any more.
    """

    grid: Grid
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    rule: MaskRule | None
    score: ScoreRule | None
    selector: Selector | None
    address: Identity
    tile: tuple[int, int]
    backend: str
    grads: bool
    scale: float
    sink: Tensor | None
    empty: Empty
    sanitize: bool
    program: MaskProgram
    score_program: ScoreProgram | None
    reasons: tuple[str, ...]
    first: Layout | None

    def layout(self, select: Selection | None = None) -> Layout:
        """The layout of a selection of the kind this plan was made for; nothing else is decided."""
        heads = self.shape[:2]
        if isinstance(select, Selector):
            raise ArgumentError(
                "plan.layout needs a Selection, got a Selector: selector.select(q, k, plan.grid, "
                "plan.rule) makes one"
            )
        member = self.program.member
        if (select is None) != (member is None):
            wanted = "none" if member is None else "one"
            raise LayoutError(
                f"this plan was made for {wanted} selection: make a plan for calls "
                f"{'with' if member is None else 'without'} one"
            )
        if select is not None and member is not None:
            check_selection(select, self.grid, heads)
            form = (select.indices.shape[0], select.heads, select.q_block, select.kv_block)
            if form != (member.batch, member.heads, member.q_block, member.kv_block):
                raise LayoutError(
                    f"this plan was made for selections with batch {member.batch}, heads "
                    f"{member.heads} and blocks ({member.q_block}, {member.kv_block}), got batch "
                    f"{form[0]}, heads {form[1]} and blocks {form[2:]}: make a plan for it"
                )
            if select.indices.device != self.device:
                raise ShapeError(
                    f"select is on {select.indices.device} but the plan on {self.device}: move it "
                    "with select.to(device)"
                )
        return fill(
            self.program,
            self.grid,
            select,
            self.tile,
            self.empty,
            self.sanitize,
            self.device,
            Element(*self.shape[2:], self.dtype.itemsize),
            self._precision,
        )

    def fits(self, layout: Layout) -> bool:
        """Whether ``layout`` belongs to this plan: same code, lengths, heads and tile."""
        return (
            layout.program.key == self.program.key
            and (layout.grid.q_len, layout.grid.kv_len) == (self.grid.q_len, self.grid.kv_len)
            and layout.grid.batch == self.grid.batch
            and layout.block_size == self.tile
            and layout.kv_indices.device == self.device
        )

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout | None = None,
        return_lse: bool = False,
    ) -> Result:
        """Attention over the tiles of ``layout``, by default those the plan was made with."""
        q, k, v = under_autocast(q, k, v)
        self._check(q, k, v)
        layout = self._own_layout() if layout is None else layout
        if not self.fits(layout):
            raise LayoutError(
                f"{layout!r} does not belong to this plan ({self.grid}, tiles of {self.tile[0]}x"
                f"{self.tile[1]}, {self.address}): make it with plan.layout"
            )
        if not torch.compiler.is_compiling() and layout.versions != self.program.versions(
            self.grid
        ):
            raise LayoutError(
                "a tensor that the rule or q_offset reads has changed since this layout was made, and "
                "its tiles with it: make the layout anew with plan.layout"
            )
        backend = _BACKENDS[self.backend]
        score_tables = self._score_tables()
        learned = any(t.requires_grad for t in (q, k, v, *score_tables))
        need_lse = return_lse or self.sink is not None
        call = self._call(torch.is_grad_enabled() and learned, need_lse)
        self._refuse(backend, call)
        q, k, v = (self.address.pack(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        if layout.seen_keys is not None:
            hidden = ~layout.seen_keys[..., None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        work = Work(q, k, v, layout, self.score_program, score_tables, self.scale, need_lse)
        with torch.autocast(self.device.type, enabled=False):
            out, lse = backend.run(work)
            out = self.address.unpack(out, self.grid.batch)
            if lse is not None:
                lse = self.address.unpack(lse, self.grid.batch)
                if self.sink is not None:
                    out, lse = with_sink(Partial(out, lse), self.sink)
        return Result(out, lse if return_lse else None, self, layout)

    def _own_layout(self) -> Layout:
        if self.first is None:
            raise ArgumentError("this plan holds no layout: pass one, plan.layout(selection)")
        if not torch.compiler.is_compiling() and not self.program.counts_changes(self.grid):
            return self.layout(self.first.select)
        return self.first

    def raise_pending(self, layout: Layout | None = None) -> None:
        """Reads what a compiled or captured region could only note down on the device."""
        layout = self.first if layout is None else layout
        if layout is not None and layout.has_empty_row is not None and bool(layout.has_empty_row):
            raise EmptyRowError("some query sees no key, and empty='error'")

    @property
    def _precision(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def _score_tables(self) -> list[Tensor]:
        if self.score_program is None:
            return []
        return self.score_program.tables(self.grid, self.device, self._precision)

    def _call(self, grads: bool, lse: bool) -> Call:
        _, _, head_dim, v_head_dim = self.shape
        return Call(self.device, self.dtype, head_dim, v_head_dim, grads, lse)

    def _refuse(self, backend: Backend, call: Call) -> None:
        if (why := backend.refuses(call)) is not None:
            raise BackendError(
                f"backend {backend.name!r} cannot run this: {why}; use backend='tiles'"
            )
        if backend is flex and flex.tile_for(self.tile, call) != self.tile:
            raise BackendError(
                f"this plan has tiles of {self.tile[0]}x{self.tile[1]}, but FlexAttention's backward "
                f"needs multiples of {flex.TRAINING_TILE}: make the plan from tensors that require "
                "gradients"
            )

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_qkv(q, k, v)
        q_heads, kv_heads, head_dim, v_head_dim = self.shape
        batch, q_len, kv_len = self.grid.batch, self.grid.q_len, self.grid.kv_len
        wanted = {
            "q": (q, (batch, q_heads, q_len, head_dim)),
            "k": (k, (batch, kv_heads, kv_len, head_dim)),
            "v": (v, (batch, kv_heads, kv_len, v_head_dim)),
        }
        for name, (x, shape) in wanted.items():
            if tuple(x.shape) != shape:
                raise ShapeError(
                    f"this plan was made for {name} {list(shape)}, got {list(x.shape)}: make a plan "
                    "for it"
                )
        if q.dtype != self.dtype or q.device != self.device:
            raise ShapeError(
                f"this plan was made for {self.dtype} on {self.device}, got {q.dtype} on {q.device}: "
                "make a plan for it"
            )

    def __str__(self) -> str:
        q_heads, kv_heads, head_dim = self.shape[:3]
        lines = [
            f"Plan for {self.grid}, {q_heads} query and {kv_heads} KV heads of {head_dim}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}",
            f"  rule     {'none' if self.rule is None else describe(self.rule)}",
            f"  score    {'none' if self.score is None else describe(self.score)}",
            f"  backend  {self.backend}, tiles of {self.tile[0]}x{self.tile[1]}, {self.address}",
        ]
        return "\n".join(lines + [f"  because  {why}" for why in self.reasons])


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
) -> Plan:
    """Decides how calls like this one run, and makes the first layout.

    ``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]``, ``v [B, Hkv, S, Dv]``. ``backend``, ``pack`` (how heads
    are laid) and ``tile`` override what would be chosen.
    """
    q, k, v = under_autocast(q, k, v)
    check_qkv(q, k, v)
    grid = Grid(q.shape[2], k.shape[2], q_offset=q_offset, batch=q.shape[0])
    heads = (q.shape[1], k.shape[1])
    ruled, scored = as_rule(rule), as_score(score)
    selector = select if isinstance(select, Selector) else None
    selection = selector.select(q, k, grid, ruled) if selector is not None else select
    if selection is not None:
        selection = check_selection(selection, grid, heads)
        if selection.indices.device != q.device:
            raise ShapeError(
                f"select is on {selection.indices.device} but q on {q.device}: move it with "
                "select.to(device)"
            )
    reach = check_fallback(fallback)
    checked_scale = check_scale(scale, q.shape[3])
    sink = check_sink(sink, heads[0], q.device)
    reasons: list[str] = []
    address = _address(q, k, v, selection, pack, reasons)
    program = mask_program(address, grid, ruled, selection, reach)
    score_code = score_program(address, grid, scored)
    learned = [] if score_code is None else list(score_code.score.tensors)
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *learned))
    call = Call(q.device, q.dtype, q.shape[3], v.shape[3], grads, sink is not None)
    chosen = _backend(backend, call, reasons)
    plan = Plan(
        grid=grid,
        shape=(*heads, q.shape[3], v.shape[3]),
        dtype=q.dtype,
        device=q.device,
        rule=ruled,
        score=scored,
        selector=selector,
        address=address,
        tile=_tile(tile, chosen, call, reasons),
        backend=chosen.name,
        grads=grads,
        scale=checked_scale,
        sink=sink,
        empty=check_empty(empty),
        sanitize=sanitize,
        program=program,
        score_program=score_code,
        reasons=tuple(reasons),
        first=None,
    )
    object.__setattr__(plan, "first", plan.layout(selection))
    return plan


def _address(
    q: Tensor, k: Tensor, v: Tensor, select: Selection | None, pack: str | None, why: list[str]
) -> Identity:
    heads, kv_heads = q.shape[1], k.shape[1]
    if pack not in (None, "identity", "fold"):
        raise ArgumentError(f"pack must be None, 'identity' or 'fold', got {pack!r}")
    viewable = all(folds_without_copy(x) for x in (q, k, v))
    per_query = select is not None and select.heads == heads and heads != kv_heads
    if pack == "fold":
        if not viewable:
            raise LayoutError(
                "pack='fold' needs q, k and v whose heads fold into the batch without a copy: make "
                "them contiguous as [B, H, S, D], or leave pack out"
            )
        why.append("KV heads are folded as asked")
        return FoldedHeads(heads, kv_heads)
    per_kv = select is not None and select.heads == kv_heads and 1 < kv_heads < heads
    if pack == "identity" or not per_kv or per_query:
        return Identity(heads, kv_heads)
    if not viewable:
        why.append("a list per KV head is repeated for its query heads: folding would copy tensors")
        return Identity(heads, kv_heads)
    why.append("one list per KV head: folded, so that its query heads share it")
    return FoldedHeads(heads, kv_heads)


def _backend(name: str, call: Call, why: list[str]) -> Backend:
    if name != "auto":
        if name not in _BACKENDS:
            raise BackendError(f"backend must be one of auto, {', '.join(_BACKENDS)}, got {name!r}")
        backend = _BACKENDS[name]
        if (refusal := backend.refuses(call)) is not None:
            raise BackendError(f"backend {name!r} cannot run this: {refusal}; use backend='tiles'")
        why.append(f"{name} was asked for")
        return backend
    if call.device.type == "cpu":
        why.append(
            "tiles on CPU: FlexAttention there compiles anew for each length and has neither backward "
            "nor lse (backend='flex' takes it, forward only)"
        )
        return tiles
    if (refusal := flex.refuses(call)) is not None:
        why.append(f"tiles: {refusal}")
        return tiles
    why.append("flex: one fused kernel, forward and backward")
    return flex


def _tile(
    tile: int | tuple[int, int] | None, backend: Backend, call: Call, why: list[str]
) -> tuple[int, int]:
    wanted = _DEFAULT_TILE if tile is None else tile_size(tile)
    given = flex.tile_for(wanted, call) if backend is flex else wanted
    if given != wanted:
        need = "its backward" if call.grads else "tensor cores"
        why.append(
            f"tiles of {wanted[0]}x{wanted[1]} run as {given[0]}x{given[1]}, exact inside, for {need}"
        )
    return given


def under_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as autocast wants them; as they are outside of it."""
    if not all(isinstance(t, Tensor) for t in tensors):
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)
