"""What may be shown, and how its pairs are asked: a rule, a selection, both, a layout or a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.arguments import check_selection, tile_size
from flexsparse.coverage import Span
from flexsparse.errors import ArgumentError
from flexsparse.grid import Grid
from flexsparse.intervals import rule_codes
from flexsparse.kernels.rows import FULL, PARTIAL
from flexsparse.layout import Layout
from flexsparse.parameters import describe
from flexsparse.plan import Plan
from flexsparse.program import MaskProgram, mask_program
from flexsparse.rules import MaskMod, MaskRule, as_rule
from flexsparse.selection import Selection
from flexsparse.telling import selected
from flexsparse.viz.asking import counted
from flexsparse.viz.axis import Axis
from flexsparse.viz.raster import Raster, assembled

Showable = MaskMod | Selection | Layout | Plan | None

# Past this length tiles are those of a kernel; up to it, small enough to tell them apart.
_SMALL = 512
# Units looked at on one axis, whatever the length.
_UNITS = 1280


@dataclass(frozen=True, eq=False)
class Source:
    """One batch and head of what is shown. ``select`` is ``[1, 1, R, K]`` of that head, and
    ``tiles``, bool ``[R, C]`` twice, the partial and full tiles where a layout knows them.
    """

    title: str
    q_len: int
    kv_len: int
    q_offset: int
    tile: tuple[int, int]
    mask: MaskMod
    select: Selection | None
    tiles: tuple[Tensor, Tensor] | None

    @property
    def alike(self) -> bool:
        """Whether the two lengths can share a scale."""
        return max(self.q_len, self.kv_len) <= 8 * min(self.q_len, self.kv_len)

    def raster(self, rows: int, columns: int, *, square: bool = True) -> Raster:
        """At most ``rows`` by ``columns`` cells, as `axes` cuts them."""
        q, kv = self.axes(rows, columns, square=square)
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            # Kernels may ask about a pair that rule and selection do not: a fallback's.
            member = None if self.tiles is not None else self.select
            counts = counted(self.mask, member, q, kv)
            return assembled(counts, q, kv, self.tiles)

    def axes(self, rows: int, columns: int, *, square: bool = True) -> tuple[Axis, Axis]:
        """Square cells, unless one axis is far longer or something else is wanted."""
        lengths = (self.q_len, self.kv_len)
        if square and self.alike:
            coarsest = max(self.q_len / rows, self.kv_len / columns)
            rows, columns = (max(1, int(n / coarsest)) for n in lengths)
        q = Axis.fitting(self.q_len, self.tile[0], rows, _UNITS)
        # Drawn apart from the queries': the diagonal would be met too often.
        kv = Axis.fitting(self.kv_len, self.tile[1], columns, _UNITS, seed=1)
        return q, kv

    def boxes(self, limit: int) -> Tensor | None:
        """``[n, 4]``: first and last-but-one query, then key, of each candidate; None past ``limit``."""
        if self.select is None or self.select.shape.numel() > 16 * limit:
            return None
        chosen = self.select.indices[0, 0]
        row, slot = (chosen >= 0).nonzero(as_tuple=True)
        if len(row) > limit:
            return None
        q, kv = row * self.select.q_block, chosen[row, slot] * self.select.kv_block
        last_q = (q + self.select.q_block).clamp(max=self.q_len)
        last_kv = (kv + self.select.kv_block).clamp(max=self.kv_len)
        return torch.stack([q, last_q, kv, last_kv], 1)


def source(
    shown: Showable,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    select: Selection | None = None,
    tile: int | tuple[int, int] | None = None,
    b: int = 0,
    h: int = 0,
    q_offset: int | Tensor | None = None,
    heads: int | None = None,
) -> Source:
    """What `flexsparse.plot` takes, judged. ``h`` is a query head: of ``heads``, where a selection
    serves several by one list, else of as many as the selection has."""
    with torch.device("cpu"):
        return _judged(shown, q_len, kv_len, select, tile, b, h, q_offset, heads)


def _judged(
    shown: Showable,
    q_len: int | None,
    kv_len: int | None,
    select: Selection | None,
    tile: int | tuple[int, int] | None,
    b: int,
    h: int,
    q_offset: int | Tensor | None,
    heads: int | None,
) -> Source:
    for name, index in (("b", b), ("h", h)):
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ArgumentError(f"{name} must be an index of at least 0, got {index!r}")
    if isinstance(shown, Plan):
        if shown.first is None:
            raise ArgumentError("this plan holds no layout to show: show plan.layout(selection)")
        title = None if shown.rule is None else describe(shown.rule)
        return _of_layout(shown.first, title, b, h)
    if isinstance(shown, Layout):
        if any(x is not None for x in (q_len, kv_len, select, tile, q_offset)):
            raise ArgumentError(
                "a layout has its own lengths, selection and tiles: show it alone, with b and h"
            )
        return _of_layout(shown, None, b, h)
    rule = None
    if isinstance(shown, Selection):
        if select is not None:
            raise ArgumentError("select belongs beside a rule: show the Selection alone")
        select = shown
    else:
        rule = as_rule(shown, "what is shown")
    if select is not None:
        if not isinstance(select, Selection):
            raise ArgumentError(
                f"select must be a Selection, got {type(select).__name__}: a Selector makes one of "
                "q and k, selector.select(q, k, grid, rule)"
            )
        q_len, kv_len = q_len or select.q_len, kv_len or select.kv_len
    if q_len is None:
        raise ArgumentError("a rule is shown with a length, such as plot(rule, 1024)")
    grid = Grid(q_len, kv_len or q_len, q_offset=q_offset, batch=_batch(q_offset, b))
    if select is not None:
        several = select
        select = _lane(select, b, h, heads or select.heads)
        check_selection(select, grid, (1, 1))
        return _of_rule(rule, grid, select, tile, b, h, several)
    return _of_rule(rule, grid, None, tile, b, h, None)


def _batch(q_offset: int | Tensor | None, b: int) -> int:
    """As many sequences as offsets are given, or as ``b`` needs."""
    if isinstance(q_offset, Tensor) and q_offset.numel() > 1:
        if b >= q_offset.numel():
            raise ArgumentError(f"b must be below {q_offset.numel()}, as many as q_offset, got {b}")
        return q_offset.numel()
    return b + 1


def _of_rule(
    rule: MaskRule | None,
    grid: Grid,
    select: Selection | None,
    tile: int | tuple[int, int] | None,
    b: int,
    h: int,
    several: Selection | None,
) -> Source:
    program = mask_program(Identity(h + 1, 1), grid, rule, None, None)
    small = max(grid.q_len, grid.kv_len) <= _SMALL
    tiles = tile_size(tile if tile is not None else 16 if small else 128)
    fixed = program.fixed_tables(grid, torch.device("cpu"))
    found = None
    if select is None:
        span = Span(grid.q_len, grid.kv_len, *tiles)
        codes = rule_codes(program, fixed, grid, span, torch.device("cpu"))
        code = codes[b % codes.shape[0], h % codes.shape[1]]
        found = (code == PARTIAL, code == FULL)
    return Source(
        title=_title(None if rule is None else describe(rule), several, program, b, h),
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        q_offset=_offset(grid, b),
        tile=tiles,
        mask=_at(program.mod(program.tables(fixed)), b, h),
        select=select,
        tiles=found,
    )


def _of_layout(layout: Layout, name: str | None, b: int, h: int) -> Source:
    layout = layout.to("cpu")
    grid, address = layout.grid, layout.address
    if b >= grid.batch or h >= address.heads:
        raise ArgumentError(
            f"this layout has {grid.batch} sequences and {address.heads} query heads, got b={b}, h={h}"
        )
    at = torch.tensor
    entry, lane, _ = address.kernel(at(b, device="cpu"), at(h, device="cpu"), at(0, device="cpu"))
    partial, full = (
        maps[entry % maps.shape[0], lane % maps.shape[1]] for maps in layout.tile_maps()
    )
    mask = layout.mask_mod
    rule, several = layout.program.rule, layout.select
    if name is None and rule is not None:
        name = rule.name
    return Source(
        title=_title(name, several, layout.program, b, h),
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        q_offset=_offset(grid, b),
        tile=layout.logical_span[2:],
        mask=_at(lambda b, h, q, kv: mask(*address.kernel(b, h, q), kv), b, h),
        select=None if several is None else _lane(several, b, h, address.heads),
        tiles=(partial, full),
    )


def _lane(select: Selection, b: int, h: int, heads: int) -> Selection:
    """``[1, 1, R, K]``: what sequence b and query head h of ``heads`` choose from."""
    batch = select.shape[0]
    if (select.heads > 1 and h >= heads) or (batch > 1 and b >= batch):
        raise ArgumentError(
            f"this selection has {batch} sequences and {heads} heads, got {b=}, {h=}"
        )
    own = h // (heads // select.heads) if select.heads > 1 else 0
    indices = select.indices[b % batch, own][None, None].cpu()
    return Selection(indices, select.q_len, select.kv_len, select.q_block, select.kv_block)


def _title(rule: str | None, select: Selection | None, program: MaskProgram, b: int, h: int) -> str:
    """What is shown, and of which sequence and head, where they differ."""
    parts = [part for part in (rule, None if select is None else selected(select)) if part]
    if program.uses_batch or (select is not None and select.shape[0] > 1):
        parts.append(f"sequence {b}")
    if program.uses_head or (select is not None and select.heads > 1):
        parts.append(f"head {h}")
    return ", ".join(parts or ["no rule"])


def _offset(grid: Grid, b: int) -> int:
    if isinstance(grid.q_offset, Tensor):
        return int(grid.q_offset.reshape(-1)[b % grid.q_offset.numel()])
    return grid.q_offset


def _at(mask: MaskMod, entry: int, lane: int) -> MaskMod:
    def asked(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = torch.tensor
        return mask(at(entry, device="cpu"), at(lane, device="cpu"), q, kv)

    return asked
