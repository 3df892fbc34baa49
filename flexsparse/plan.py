"""Decisions: which address, tile and backend a call gets, made once, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.ahead import Ahead, Terms, look_ahead
from flexsparse.arguments import check_flag
from flexsparse.backends import Backend, Call, Work, account
from flexsparse.backends.pieces import run_launches
from flexsparse.budget import Budget
from flexsparse.building import make
from flexsparse.choice import BACKENDS, UNTILED
from flexsparse.chunks import check_chunk, chunk_ahead, chunk_layout, chunk_terms
from flexsparse.device import without_autocast
from flexsparse.errors import ArgumentError, BackendError, EmptyRowError, LayoutError
from flexsparse.fitting import as_made, check_own, check_select, check_tensors, checked_qkv
from flexsparse.grid import Grid
from flexsparse.kernels.columns import Room
from flexsparse.layout import Layout
from flexsparse.merge import Partial, with_sink
from flexsparse.moving import Step, check_step, move, ready, refuse_outside, refuse_past
from flexsparse.occupancy import on_device_only
from flexsparse.program import MaskProgram, ScoreProgram
from flexsparse.repeats import again, note
from flexsparse.result import Result
from flexsparse.rules import MaskRule
from flexsparse.scores import ScoreRule
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector
from flexsparse.shown import Shown
from flexsparse.telling import lines
from flexsparse.updating import Rows, check_room, check_rows, update


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """What was decided for one shape and kind of call. ``print(plan)`` says it and why.

    ``plan.layout(selection)`` makes the layout of the next selection, on the device alone;
    ``plan.run(q, k, v, layout)`` decides nothing any more. A plan made with a selector holds what that chose
    for the q and k it was made with; it does not choose again.
    """

    terms: Terms
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    rule: MaskRule | None
    score: ScoreRule | None
    selector: Selector | None
    backend: str
    scale: float
    sink: Tensor | None
    score_program: ScoreProgram | None
    reasons: tuple[str, ...]
    ahead: Ahead
    first: Layout | None
    whole: Plan | None = None
    """The plan that this one is a chunk of."""
    taken: set[tuple[bool, bool, bool]] = field(default_factory=set, init=False)
    """What of (gradients, lse, gradients of the score's tensors) the backend was found to do."""

    @property
    def grid(self) -> Grid:
        return self.terms.grid

    @property
    def program(self) -> MaskProgram:
        return self.terms.program

    @property
    def address(self) -> Identity:
        return self.terms.program.address

    @property
    def tile(self) -> tuple[int, int]:
        return self.terms.block_size

    @property
    def device(self) -> torch.device:
        return self.terms.device

    def layout(
        self,
        select: Selection | None = None,
        *,
        into: Layout | None = None,
        rows: Rows | None = None,
    ) -> Layout:
        """The layout of a selection of the kind this plan was made for; nothing else is decided.

        With ``into``, an earlier layout of this plan, it is written into the tensors of that one, which
        is returned and stands for ``select`` from then on: a captured graph that reads them sees the
        new tiles. If of all rows of the selection only ``rows`` have other candidates (a range or an
        int tensor ``[n]``, -1 for none), only the tiles that they meet are written. Chunks of it are
        outdated then, and `Result.budget` counts it as it is. Not between a forward and its backward, which
        read the same tensors: there torch refuses, save where activation checkpointing runs the forward
        again, of what stands there by then.
        """
        check_select(self, select)
        ahead = self._looked_ahead()
        if into is None:
            if rows is not None:
                raise ArgumentError("rows say what changed in a layout: give it, with into=layout")
            if select is None and self.first is not None and self.first.stands(ahead.versions):
                # Of a rule alone there is one layout, and no graph could find it anew.
                return self.first
            return make(self.terms, select, ahead)
        check_own(self, into, "into")
        if rows is not None:
            if select is None:
                raise ArgumentError("rows are those of a selection: pass it, with its other rows")
            check_rows(rows, select, self.device)
            if not (into.versions.extends(ahead.versions) and into.versions.knows(into.writes)):
                into.refuse_outdated()
        update(into, self.terms, select, ahead, rows)
        return into

    def advance(self, layout: Layout, *, by: Step = 1, select: Selection | None = None) -> Layout:
        """Moves the queries ``by`` positions on, and ``layout`` with them; the device alone works.

        For sequences that grow within ``kv_len``, the capacity of k and v: ``q_offset``, an int tensor
        on the device, is added to in place, and the layout written anew in its own tensors, for
        ``select``, chosen for the new position, or for its present selection. To choose by a grid that reads
        ``q_offset`` itself, advance first, then ``plan.layout(chosen, into=layout)``. ``by`` is an int or a tensor ``[B]``, and may be
        negative. All of it can stand in a CUDA graph, once it has run outside. Other layouts of this
        plan are outdated from then on: ``plan.layout(select, into=other)`` brings them along.

        A step past the last key, or to before the tables of rule and score, is an error on CPU;
        elsewhere such queries stay where they are, and `raise_pending` tells.
        """
        check_own(self, layout, "layout")
        if self.whole is not None:
            raise LayoutError("a chunk of a plan does not advance: advance the plan it is of")
        select = layout.select if select is None else select
        check_select(self, select)
        check_step(self.terms, by)
        layout.refuse_outdated()
        check_room(layout, self.terms, select)
        ahead = ready(self.terms, self.ahead, self.rule, self.score, self.score_program)
        refuse_outside(ahead, self.grid, by)
        move(self.terms, ahead, by)
        moved = replace(ahead, versions=self.program.versions(self.grid))
        object.__setattr__(self, "ahead", moved)
        update(layout, self.terms, select, self.ahead)
        return layout

    def chunk(self, start: int, stop: int, layout: Layout | None = None) -> Plan:
        """The plan of queries ``start..stop`` of this plan's q, for prefill in parts.

        Nothing is found again: its tiles are cut out of ``layout``, by default the one that this plan
        was made with. ``start`` and ``stop`` are multiples of the query tile and of the selection's
        ``q_block``; the last stop is q_len. Run it on ``q[:, :, start:stop]`` and all of k and v. A
        tensor ``q_offset`` is copied: once it has changed, the chunk is outdated.
        """
        check_chunk(self.terms, start, stop)
        ahead = self._looked_ahead()
        if layout is None and self.first is not None:
            current = self.program.counts_changes(self.grid) and self.first.versions.current
            layout = self.first if current else self.layout(self.first.select)
        if layout is not None:
            check_own(self, layout, "layout")
            layout.refuse_outdated()
        terms, score = chunk_terms(self.terms, start, stop), self.score_program
        ahead = chunk_ahead(ahead, terms, start)
        return replace(
            self,
            terms=terms,
            selector=None,
            score_program=score and replace(score, offset=terms.program.offset),
            reasons=(*self.reasons, f"queries {start} to {stop - 1} of {self.grid.q_len}"),
            ahead=ahead,
            first=None if layout is None else chunk_layout(layout, terms, ahead, start),
            whole=self,
        )

    def _looked_ahead(self) -> Ahead:
        """What the rule makes of the tiles: found once, and again when a tensor it reads changes."""
        if torch.compiler.is_compiling():
            return self.ahead
        moving = self.ahead.past is not None and on_device_only(self.device)
        if self.whole is not None or moving:
            if not self.ahead.versions.current:
                what = "graph: call plan.layout outside it" if moving else "chunk: cut it anew"
                raise LayoutError(
                    f"a tensor of the rule or q_offset has changed, unknown to this {what}"
                )
            return self.ahead
        counts = self.program.counts_changes(self.grid)
        if counts and self.ahead.versions.current:
            return self.ahead
        ahead = self.ahead.renewed(look_ahead(self.terms))
        object.__setattr__(self, "ahead", ahead)
        return ahead

    def takes(self, select: Selection) -> bool:
        """Whether a selection has the batch, heads and blocks that this plan was made for."""
        member = self.program.member
        # A chunk of one row of the selection keeps the code of the whole.
        return (
            member is not None
            and select.batch == member.batch
            and (select.heads, select.q_block, select.kv_block)
            == (member.heads, member.q_block, member.kv_block)
        )

    def fits(self, layout: Layout) -> bool:
        """Whether ``layout`` is for this plan's rule, lengths, heads, tile and device, and holds what its
        ``sanitize`` and ``empty`` ask for.

        Quick for the plan's own layouts; for one made elsewhere the tensors of the rules are compared.
        """
        if layout.kv_indices.device != self.device:
            return False
        terms = self.terms
        if terms.sanitize and layout.seen_keys is None:
            return False
        if terms.empty == "error" and layout.has_empty_row is None:
            return False
        if layout.program is self.program:
            return True
        return (
            layout.program.key == self.program.key
            and layout.block_size == self.tile
            and (layout.grid.q_len, layout.grid.kv_len, layout.grid.batch)
            == (self.grid.q_len, self.grid.kv_len, self.grid.batch)
            and self.program.reads_the_same(layout.tables, self.grid)
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
        if (repeated := again(self, q, k, v, layout, return_lse)) is not None:
            return repeated
        if not as_made(self, q, k, v):
            q, k, v = checked_qkv(q, k, v)
            check_tensors(self, q, k, v)
        layout = self._own_layout() if layout is None else layout
        if not isinstance(layout, Layout):
            raise ArgumentError(
                f"layout must be a Layout, got {type(layout).__name__}: make one with plan.layout"
            )
        layout.refuse_outdated()
        if not self.fits(layout):
            raise LayoutError(
                f"{layout!r} does not belong to this plan ({self.grid}, tiles of {self.tile[0]}x"
                f"{self.tile[1]}, {self.address}): make it with plan.layout"
            )
        backend = BACKENDS[self.backend]
        score_tables = self._score_tables()
        learned = any(t.requires_grad for t in score_tables)
        wanted = learned or q.requires_grad or k.requires_grad or v.requires_grad
        need_lse = check_flag("return_lse", return_lse) or self.sink is not None
        grads = torch.is_grad_enabled() and wanted
        self._refuse(backend, grads, need_lse, learned)
        if grads and self.backend not in UNTILED:
            layout = self._with_columns(layout)
        given, address = (q, k, v), self.address
        q, k, v = address.pack(q, "q"), address.pack(k, "k"), address.pack(v, "v")
        if layout.seen_keys is not None:
            hidden = ~layout.seen_keys[..., None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        work = Work(q, k, v, layout, self.score_program, score_tables, self.scale, need_lse, grads)
        with without_autocast(self.device):
            out, lse = run_launches(backend, work)
            out = address.unpack(out, self.grid.batch)
            if lse is not None:
                lse = address.unpack(lse, self.grid.batch)
                if self.sink is not None:
                    out, lse = with_sink(Partial(out, lse), self.sink)
        note(self, *given, work)
        return Result(out, lse if return_lse else None, self, layout)

    def budget(self, layout: Layout | None = None) -> Budget:
        """What a run over ``layout`` is asked for, and what its backend touches: tiles, gathered keys or
        all pairs. Counted without a clock; reads the device."""
        layout = self._own_layout() if layout is None else layout
        return self._budget(layout, False, self.terms.columns != 0)

    def _budget(self, layout: Layout, lse: bool, grads: bool) -> Budget:
        plain = self.score_program is None and self.sink is None and not lse
        return account.budget(self.backend, layout, plain=plain, grads=grads)

    @property
    def reads(self) -> str:
        """In words, what its backend reads: tiles, or what it takes in their place."""
        return account.reads(self.backend, self.tile)

    def _with_columns(self, layout: Layout) -> Layout:
        """The layout with all it needs for gradients of keys and values.

        Where columns have less room than there are rows, the host looks whether they sufficed.
        """
        if layout.columns is None:
            layout = layout.with_columns(self.terms.columns or None)
        assert layout.columns is not None
        if not layout.may_lack_rows or on_device_only(self.device):
            return layout
        needed = layout.columns.needed()
        return layout if layout.columns.room.holds(needed) else self._with_room(layout, needed)

    def measured(self, layout: Layout) -> Layout:
        """Cuts the lists by column to what they need and a quarter more, where they are large."""
        batch, lists, columns = self.grid.batch, layout.kv_num_blocks.shape, layout.span.tiles[1]
        rows = layout.span.tiles[0]
        _, kv_heads, head_dim, v_head_dim = self.shape
        read = batch * kv_heads * self.grid.kv_len * (head_dim + v_head_dim) * self.dtype.itemsize
        full = 2 * lists[0] * lists[1] * rows * columns * 4
        if (
            layout.select is None
            or layout.columns is None
            or full <= read * _LARGE
            or on_device_only(self.device)
        ):
            return layout
        return self._with_room(layout, layout.columns.needed())

    def _with_room(self, layout: Layout, needed: Room) -> Layout:
        """From here on columns have room for ``needed`` rows and a quarter more."""
        room = needed.grown(layout.span.tiles[0])
        object.__setattr__(self, "terms", self.terms._replace(columns=room))
        return layout.with_columns(room)

    def _own_layout(self) -> Layout:
        if self.first is None:
            raise ArgumentError("this plan holds no layout: pass one, plan.layout(selection)")
        if not torch.compiler.is_compiling() and not self.program.counts_changes(self.grid):
            return self.layout(self.first.select)
        return self.first

    def raise_pending(self, layout: Layout | None = None) -> None:
        """Reads what a compiled or captured region could not: what it noted down on the device, and
        whether a tensor of the rule or ``q_offset`` has changed, whose tiles such a region keeps."""
        refuse_past(self.ahead, self.grid)
        layout = self.first if layout is None else layout
        if layout is None:
            return
        layout.refuse_outdated()
        if layout.has_empty_row is not None and bool(layout.has_empty_row):
            raise EmptyRowError("some query sees no key, and empty='error'")
        if layout.columns is None:
            return
        room, needed = layout.columns.room, layout.columns.needed()
        for kind in Room._fields:
            given, asked = getattr(room, kind), getattr(needed, kind)
            if asked > given:
                raise LayoutError(
                    f"a column of tiles is visited by {asked} rows of {kind} tiles, but this plan has room "
                    f"for {given}: gradients of keys and values are incomplete; make the plan from a "
                    "selection as uneven as this one"
                )

    def _score_tables(self) -> list[Tensor]:
        if self.score_program is None:
            return []
        precision = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.score_program.tables(self.grid, self.device, precision)

    def call(self, grads: bool, lse: bool = False, learned: bool = False) -> Call:
        """What of its backend is asked in such a run."""
        of = (self.device, self.dtype, *self.shape[2:], self.grid.q_len)
        return Call(*of, grads, lse, grads and learned, self.program, self.score_program)

    def _refuse(self, backend: Backend, grads: bool, lse: bool, learned: bool) -> None:
        # What a compiled region wrote down would make it compile again.
        remembers = not torch.compiler.is_compiling()
        asked = (grads, lse, learned)
        if remembers and asked in self.taken:
            return
        call = self.call(*asked)
        if (why := backend.refuses(call)) is not None:
            raise BackendError(
                f"backend {backend.name!r} cannot run this: {why}; use backend='tiles'"
            )
        if backend.tile_for(self.tile, call) != self.tile:
            raise BackendError(
                f"this plan has tiles of {self.tile[0]}x{self.tile[1]}, but the backward of "
                f"{backend.name} needs larger ones: make the plan from tensors that require gradients"
            )
        if remembers:
            self.taken.add(asked)

    def __repr__(self) -> str:
        return (
            f"Plan({self.grid}, heads={self.shape[:2]}, backend={self.backend!r}, {self.reads}, "
            f"{self.address})"
        )

    def __str__(self) -> str:
        return lines(self)


# Lists by column are cut to their need where whole they would take more than this beside K and V.
_LARGE = 0.01
