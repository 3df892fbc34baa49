"""A judge as one kernel: traced once for a kind of rule, compiled, and kept.

Run line by line a judge is some thousand small kernels, which on a device cost more than what they
compute. Traced, it is one, of which every number is an argument: lengths, tile sizes, tables and what
answers over ranges of them. So a rule with another window or other documents compiles nothing.

Bounds stay bounds in a fused kernel. Integers below 2 ** 53 and truths come out the same however they
are computed. A float is widened by four epsilons of its own type, in fp64 by 1e-15, and what a compiler
may do to a bound, which is to fuse a product with its sum, moves it by half a rounding of fp64: 1.1e-16
of it, within that. Nothing is decided by a rounding to a narrower type, which a compiler may leave out;
rules that compute in types which kernels widen to fp32 are not fused at all. What decides that a tile is
partial are corners, and these are believed of whole numbers alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexsparse.address import Identity
from flexsparse.coverage import Span
from flexsparse.device import compiles
from flexsparse.intervals.compiled import as_kernel
from flexsparse.intervals.corners import Corners
from flexsparse.intervals.tables import Pyramid, Ranges, Table
from flexsparse.intervals.verdicts import Judge, Wide
from flexsparse.kernels.rows import EMPTY, FULL, PARTIAL
from flexsparse.program import MaskProgram
from flexsparse.shapes import ceil_div

# Beside what is settled: left open, and open where the code might fail at some pair.
OPEN, MAY_FAIL = 3, 4
# Devices on which launches cost more than what a judge computes.
FUSED_ON = frozenset({"cuda"})
# How often a kind of rule is built before its judge is compiled, which takes seconds: it pays for who
# builds at every step, such as for the documents of each batch.
BUILDS_BEFORE = 8
# Tiles judged at once.
TILES_AT_ONCE = 2**26
_NARROW = ("torch.float16", "torch.bfloat16", "torch.float8")
# Stands for the first of the tiles that a kernel counts, where it is told which to judge.
_NAMED = -1
# A length that no constant of a rule's code is likely to be, for the tiles of a trace.
_TRACED_TILES = 1009
# Of span, its tiles, a cut, and heads; behind them the lengths of tables.
_NUMBERS = 4 + 2 + 4 + 1

Axes = tuple[int, ...]


class Cut(NamedTuple):
    """Every row of tiles in stretches of ``size`` columns, ``wide`` to a row; of its queries those
    from ``start`` to before ``stop``."""

    wide: int
    size: int
    start: int
    stop: int


class _Read(NamedTuple):
    """A table read over ranges of some axes, and whether by a pyramid."""

    table: int
    axes: Axes
    pyramid: bool


class FusedJudge(NamedTuple):
    """The judge of a rule in one call, as one kernel over all that it reads."""

    kernel: Callable[..., Tensor]
    read: list[Tensor]
    lengths: tuple[int, ...]
    span: Span
    lists: tuple[int, int]
    device: torch.device

    @property
    def tiles(self) -> int:
        """How many tiles there are in all lists."""
        rows, columns = self.span.tiles
        return self.lists[0] * self.lists[1] * rows * columns

    def every(self) -> Tensor:
        """int8 ``[B, H, R, C]``: the code of each tile."""
        rows, columns = self.span.tiles
        cut = Cut(columns, 1, 0, self.span.q_tile)
        parts = []
        for begin in range(0, self.tiles, TILES_AT_ONCE):
            # Whatever these hold: the kernel counts, which else would wait for another that does.
            count = min(TILES_AT_ONCE, self.tiles - begin)
            cells = torch.empty(count, dtype=torch.int64, device=self.device)
            parts.append(self._run(cells, self._numbers(cut, begin)))
        codes = parts[0] if len(parts) == 1 else torch.cat(parts)
        return codes.view(*self.lists, rows, columns)

    def __call__(self, cells: Tensor, wide: int, size: int) -> Tensor:
        """int8 ``[n]``: codes of stretches of ``size`` columns, ``wide`` to a row of tiles.

        ``cells`` count the stretches row by row through all lists. EMPTY, FULL and PARTIAL are
        settled; OPEN is not, nor MAY_FAIL, where an error might show.
        """
        return self._asked(cells, Cut(wide, size, 0, self.span.q_tile))

    def in_slices(self, cells: Tensor, wide: int, size: int, slices: int) -> Tensor:
        """The same, by as many slices of the queries of each row."""
        step = ceil_div(self.span.q_tile, slices)
        cuts = [
            Cut(wide, size, start, min(start + step, self.span.q_tile))
            for start in range(0, self.span.q_tile, step)
        ]
        codes = torch.stack([self._asked(cells, cut) for cut in cuts])
        least, most = codes.amin(0), codes.amax(0)
        mixed = (codes == PARTIAL).any(0) | ((least == EMPTY) & (codes == FULL).any(0))
        whole = torch.where(least == most, most, OPEN)
        code = torch.where(mixed, PARTIAL, whole)
        return torch.where(most == MAY_FAIL, MAY_FAIL, code).to(torch.int8)

    def _numbers(self, cut: Cut, begin: int = _NAMED) -> Tensor:
        sizes = (*self.span, *self.span.tiles, *cut, self.lists[1], *self.lengths)
        return _on_device((begin, *sizes), self.device)

    def _asked(self, cells: Tensor, cut: Cut) -> Tensor:
        numbers = self._numbers(cut)
        if cells.numel() <= TILES_AT_ONCE:
            return self._run(cells, numbers)
        return torch.cat([self._run(part, numbers) for part in cells.split(TILES_AT_ONCE)])

    def _run(self, cells: Tensor, numbers: Tensor) -> Tensor:
        if not (count := cells.numel()):
            return cells.to(torch.int8)
        if count == 1:
            # One tile alone would be a kernel of its own.
            return self.kernel(cells.repeat(2), numbers, *self.read)[:1]
        return self.kernel(cells.contiguous(), numbers, *self.read)


class _Kind(NamedTuple):
    """What a trace depends on, beside what its tables answer with."""

    rule: str
    address: str
    offset: str
    device: torch.device


_lock = Lock()
_built: Counter[_Kind] = Counter()
# What each kind reads over ranges is found as it is first asked; None of one that is never fused.
_reads: dict[_Kind, list[tuple[int, Axes]] | None] = {}
_kernels: dict[tuple[_Kind, tuple[_Read, ...]], Callable[..., Tensor]] = {}


def fused_judge(
    program: MaskProgram,
    tables: list[Tensor],
    span: Span,
    lists: tuple[int, int],
    device: torch.device,
) -> FusedJudge | None:
    """The judge as one kernel, once its kind has been built `BUILDS_BEFORE` times; None where it has none.

    ``tables`` are those of a program of a rule alone: of its offset, then of the rule.
    """
    rule = program.rule
    if rule is None or device.type not in FUSED_ON or torch.compiler.is_compiling():
        return None
    address = "identity" if type(program.address) is Identity else program.address.key
    kind = _Kind(rule.kind, address, program.offset, device)
    given = [t.detach() for t in tables]
    first = 0 if program.offset == "none" else 1
    offset, tensors = given[:first], given[first:]
    with _lock:
        if kind not in _reads:
            _built[kind] += 1
            if _built[kind] <= BUILDS_BEFORE:
                return None
            _reads[kind] = _read_over(program, span, offset, tensors, device)
        asked = _reads[kind]
        if asked is None:
            return None
        doubts: list[Tensor] = []
        answers = [Table(tensors[i], doubts.append).over(axes) for i, axes in asked]
        reads = tuple(
            [
                _Read(*of, isinstance(answer, Pyramid))
                for of, answer in zip(asked, answers, strict=True)
            ]
        )
        lengths = tuple([n for t in tensors for n in t.shape])
        read = [t.contiguous() for t in (*given, *chain.from_iterable(answers))]
        if (kind, reads) not in _kernels:
            _kernels[kind, reads] = _compiled(program, reads, len(tensors), lengths, read, device)
        kernel = _kernels[kind, reads]
    return FusedJudge(kernel, read, lengths, span, lists, device)


def _read_over(
    program: MaskProgram,
    span: Span,
    offset: list[Tensor],
    tensors: list[Tensor],
    device: torch.device,
) -> list[tuple[int, Axes]] | None:
    """Which tables the judge reads over ranges of which axes; None where it computes in narrow types."""
    assert program.rule is not None
    if any(name in program.rule.code for name in _NARROW) or not all(map(_is_wide, tensors)):
        return None
    doubts: list[Tensor] = []
    ranged = {i: Table(t, doubts.append) for i, t in enumerate(tensors) if t.ndim}
    every = [ranged.get(i, t) for i, t in enumerate(tensors)]
    judge = Judge.over(program, span, next(iter(offset), None), every, doubts, device)
    judge.tiles(torch.zeros((1, 4), dtype=torch.int64, device=device))
    return [(i, axes) for i, t in ranged.items() for axes in t.kept]


def _is_wide(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.dtype in (torch.float32, torch.float64)


@lru_cache(maxsize=256)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _compiled(
    program: MaskProgram,
    reads: tuple[_Read, ...],
    tables: int,
    lengths: Sequence[int],
    read: list[Tensor],
    device: torch.device,
) -> Callable[..., Tensor]:
    code = _code(program, reads, tables, device)
    cells = torch.arange(_TRACED_TILES, device=device)
    numbers = torch.ones(_NUMBERS + len(lengths), dtype=torch.int64, device=device)
    with torch.no_grad():
        graph = make_fx(code, tracing_mode="fake")(cells, numbers, *read)
    traced = graph.forward
    compiles.note(f"judge/{program.key}")

    def judged(cells: Tensor, numbers: Tensor, *read: Tensor) -> Tensor:
        # How many there are would be a constant of a trace.
        counted = numbers[0] + torch.arange(cells.shape[0], device=cells.device)
        cells = torch.where(numbers[0] == _NAMED, cells, counted)
        found: Tensor = traced(cells, numbers[1:], *read)
        return found

    return as_kernel(judged)


def _code(
    program: MaskProgram, reads: tuple[_Read, ...], count: int, device: torch.device
) -> Callable[..., Tensor]:
    """What is traced: the codes of ``cells``, of nothing but arguments."""
    rule = program.rule
    assert rule is not None

    def codes(cells: Tensor, numbers: Tensor, *read: Tensor) -> Tensor:
        q_len, kv_len, q_tile, kv_tile, rows, columns, *numbers_of_call = numbers.unbind(0)
        wide, size, start, stop, heads, *lengths = numbers_of_call
        given = list(read)
        offset = None if program.offset == "none" else given.pop(0)
        tensors, rest = given[:count], given[count:]
        sizes = [tuple(lengths.pop(0) for _ in t.shape) for t in tensors]
        kept: list[dict[Axes, Ranges | Pyramid]] = [{} for _ in tensors]
        for table, axes, pyramid in reads:
            form: Any = Pyramid if pyramid else Ranges
            kept[table][axes] = form(*(rest.pop(0) for _ in form._fields))
        doubts: list[Tensor] = []
        tables = [
            Table(t, doubts.append, n, k) if t.ndim else t
            for t, n, k in zip(tensors, sizes, kept, strict=True)
        ]
        span: Any = _Span(q_len, kv_len, q_tile, kv_tile)
        judge = Judge.over(program, span, offset, tables, doubts, device)
        line, stretch = cells // wide, cells % wide
        entry, row = line // rows, line % rows
        first = stretch * size
        tiles = Wide(
            entry // heads,
            entry % heads,
            row * q_tile + start,
            row * q_tile + stop - 1,
            first,
            torch.minimum(first + size, columns) - 1,
        )
        full, empty, may_fail = judge.ask(tiles)
        mixed = Corners(rule.code, tensors, sizes).mixed(judge.place(tiles))
        code = torch.where(mixed, PARTIAL, torch.where(may_fail, MAY_FAIL, OPEN))
        code = torch.where(may_fail, MAY_FAIL, code)
        return torch.where(full, FULL, torch.where(empty, EMPTY, code)).to(torch.int8)

    return codes


class _Span(NamedTuple):
    """A span of which no number is known yet."""

    q_len: Tensor
    kv_len: Tensor
    q_tile: Tensor
    kv_tile: Tensor
