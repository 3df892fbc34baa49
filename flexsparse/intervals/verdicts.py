"""A rule asked about whole tiles: its own code, run on intervals instead of indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.grid import Grid
from flexsparse.intervals.arithmetic import operate
from flexsparse.intervals.interval import Interval, captured, exactly, ranged
from flexsparse.intervals.tables import Table
from flexsparse.program import MaskProgram, offset_of, offset_table, rule_tables

# Tiles judged at once: enough to fill the device, while what each line leaves stays in its caches.
TILES_AT_ONCE = {"cpu": 2**16, "cuda": 2**22}


class Wide(NamedTuple):
    """Rectangles, ``[n]`` each: batch and head, queries from first to last, and columns of tiles.

    What lies past the last query stands for the last.
    """

    b: Tensor
    h: Tensor
    first_q: Tensor
    last_q: Tensor
    first_column: Tensor
    last_column: Tensor


class Place(NamedTuple):
    """Batch, head, and first and last position of the queries and keys of rectangles, ``[n]`` each."""

    b: Tensor
    h: Tensor
    q: tuple[Tensor, Tensor]
    kv: tuple[Tensor, Tensor]


class Verdicts(NamedTuple):
    """bool ``[n]``: all pairs are allowed; none is; the code might fail at some pair.

    Where neither of the first two holds nothing is known. Both are false where the code might fail:
    whoever asks the pairs then meets torch's own error.
    """

    full: Tensor
    empty: Tensor
    may_fail: Tensor


class Judge:
    """The rule of a program in one call, asked about tiles; membership and fallback are not."""

    def __init__(self, program: MaskProgram, grid: Grid, span: Span, device: torch.device) -> None:
        offset = None if program.offset == "none" else offset_table(grid, program.offset, device)
        rule = program.rule
        tensors = [] if rule is None else rule_tables(rule, device, torch.float32)
        doubts: list[Tensor] = []
        tables = [Table(t, doubts.append) if t.ndim else t for t in tensors]
        self._set(program, span, offset, tables, doubts, device)

    @classmethod
    def over(
        cls,
        program: MaskProgram,
        span: Span,
        offset: Tensor | None,
        tables: Sequence[Table | Tensor],
        doubts: list[Tensor],
        device: torch.device,
    ) -> Judge:
        """The judge of a program that reads ``tables``, which take what they doubt to ``doubts``."""
        judge = cls.__new__(cls)
        judge._set(program, span, offset, tables, doubts, device)
        return judge

    def _set(
        self,
        program: MaskProgram,
        span: Span,
        offset: Tensor | None,
        tables: Sequence[Table | Tensor],
        doubts: list[Tensor],
        device: torch.device,
    ) -> None:
        self.program = program
        self.span = span
        self.offset = offset
        self.tables = tables
        self._doubts = doubts
        self._device = device

    def __call__(self, tiles: Wide) -> Verdicts:
        step = TILES_AT_ONCE[tiles.b.device.type]
        parts = [
            self.ask(Wide(*(x[start : start + step] for x in tiles)))
            for start in range(0, max(1, len(tiles.b)), step)
        ]
        return Verdicts(*(torch.cat(x) for x in zip(*parts, strict=True)))

    def tiles(self, tiles: Tensor) -> Verdicts:
        """The verdicts on single tiles ``[n, 4]`` (b, h, row, column)."""
        b, h, row, column = tiles.unbind(1)
        first = row * self.span.q_tile
        return self(Wide(b, h, first, first + self.span.q_tile - 1, column, column))

    def place(self, tiles: Wide) -> Place:
        """Where tiles stand as the rule counts: positions of queries and keys, first and last."""
        span = self.span
        first_q, last_q = (x.clamp(max=span.q_len - 1) for x in (tiles.first_q, tiles.last_q))
        first_kv = tiles.first_column * span.kv_tile
        last_kv = ((tiles.last_column + 1) * span.kv_tile).clamp(max=span.kv_len) - 1
        b, h, first_q, first_kv = self.program.address.logical(tiles.b, tiles.h, first_q, first_kv)
        if self.offset is not None:
            offset = offset_of(self.offset, self.program.offset, b)
            first_q, last_q = first_q + offset, last_q + offset
        return Place(b, h, (first_q, last_q), (first_kv, last_kv))

    def ask(self, tiles: Wide) -> Verdicts:
        """The verdicts, however many tiles there are."""
        none = torch.zeros_like(tiles.b, dtype=torch.bool)
        rule = self.program.rule
        if rule is None:
            return Verdicts(~none, none, none)
        place = self.place(tiles)
        self._doubts.clear()
        scope: dict[str, Any] = {"torch": _Torch(self._device, self._doubts.append)}
        exec(compiled(rule.code), scope)
        seen: Interval = scope["mod"](
            exactly(place.b),
            exactly(place.h),
            ranged(*place.q),
            ranged(*place.kv),
            *(t if isinstance(t, Table) else captured(t) for t in self.tables),
        )
        may_fail = none
        for doubt in self._doubts:
            may_fail = may_fail | doubt
        return Verdicts((seen.low == 1) & ~may_fail, (seen.high == 0) & ~may_fail, may_fail)


class _Torch:
    """``torch`` as the code of a rule sees it: operators work on intervals, all else is torch's."""

    def __init__(self, device: torch.device, may_fail: Callable[[Tensor], None]) -> None:
        self.ops = _Operator(torch.ops, device, may_fail)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Operator:
    def __init__(self, real: Any, device: torch.device, may_fail: Callable[[Tensor], None]) -> None:
        self._real = real
        self._device = device
        self._may_fail = may_fail

    def __getattr__(self, name: str) -> _Operator:
        return _Operator(getattr(self._real, name), self._device, self._may_fail)

    def __call__(self, *args: Any, **kwargs: Any) -> Interval:
        return operate(self._real, args, kwargs, self._device, self._may_fail)


@lru_cache(maxsize=256)
def compiled(code: str) -> CodeType:
    """The code of a rule, to be run over something else than tensors."""
    return compile(code, "<mod on intervals>", "exec")
