"""What a captured table can give over a range of its indices: range minimum and maximum.

Batch and head indices pick one entry. An axis that is read over a range has prefix structures: exact
for one such axis (a sparse table over all entries up to 32 wide, and one over blocks of 32), and for
several axes a pyramid of halvings, whose answer holds and may be wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.intervals.interval import Interval, among

# Widths up to 2 ** 5 have an entry for every place; wider ones for every block of as many.
_LEVELS = 5
# A table of more entries has a pyramid: of each bound one copy and a little instead of six.
_LARGE = 2**24
# Types in which torch finds the smaller of two everywhere; any other is kept as fp64.
_ORDERED = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)

Fold = Callable[[Tensor, Tensor], Tensor]


class Table:
    """A captured tensor that is indexed by intervals, as the code of a rule does.

    ``lengths`` of its axes are numbers of the tensor, or tensors of one number where they may differ
    from call to call of the same compiled code. ``kept`` answers over ranges of some axes, by axes.
    """

    def __init__(
        self,
        tensor: Tensor,
        may_fail: Callable[[Tensor], None],
        lengths: Sequence[int | Tensor] | None = None,
        kept: dict[tuple[int, ...], Ranges | Pyramid] | None = None,
    ) -> None:
        self.tensor = tensor.detach()
        self.may_fail = may_fail
        self.lengths = tuple(tensor.shape if lengths is None else lengths)
        self.kept = {} if kept is None else kept

    def __getitem__(self, indices: Interval | tuple[Interval, ...]) -> Interval:
        given = indices if isinstance(indices, tuple) else (indices,)
        known: Tensor | None = None
        ends: list[tuple[Tensor, Tensor]] = []
        for index, length in zip(given, self.lengths, strict=True):
            first, last, inside = _wrapped(index, length)
            self.may_fail(~inside)
            known = inside if known is None else known & inside
            ends.append((first, last))
        assert known is not None
        # An axis read at a batch or head has one entry a tile, unless arithmetic lost it.
        points = tuple(i for i, index in enumerate(given) if index.point)
        for i in points:
            known = known & (ends[i][0] == ends[i][1])
        ranged = tuple(i for i in range(len(given)) if i not in points)
        if not ranged:
            entry = entries(self.tensor, *(first for first, _ in ends))
            return among(entry, entry, self.tensor.dtype, known, True)
        at = self._place(points, [ends[i][0] for i in points])
        starts, stops = [ends[i][0] for i in ranged], [ends[i][1] for i in ranged]
        low, high = self.over(ranged).extremes(at, starts, stops)
        return among(low, high, self.tensor.dtype, known, False)

    def _place(self, axes: tuple[int, ...], indices: Sequence[Tensor]) -> Tensor:
        """Where the entry at ``indices`` of ``axes`` stands among all of those axes."""
        at = torch.zeros((), dtype=torch.int64, device=self.tensor.device)
        for axis, index in zip(axes, indices, strict=True):
            at = at * self.lengths[axis] + index
        return at

    def over(self, ranged: tuple[int, ...]) -> Ranges | Pyramid:
        """What answers over ranges of the axes ``ranged``, made when it is first asked for."""
        if ranged not in self.kept:
            points = [i for i in range(self.tensor.ndim) if i not in ranged]
            sizes = [self.tensor.shape[i] for i in ranged]
            values = self.tensor.permute(*points, *ranged).reshape(-1, *sizes)
            if values.dtype == torch.bool:
                values = values.to(torch.uint8)
            elif values.dtype not in _ORDERED:
                values = values.double()
            exact = len(ranged) == 1 and values.numel() <= _LARGE
            self.kept[ranged] = Ranges.of(values) if exact else Pyramid.of(values)
        return self.kept[ranged]


def entries(table: Tensor, *indices: Tensor) -> Tensor:
    """``table[indices]``, of which none is read on the host, as Python's brackets read a lone number."""
    found: Tensor = torch.ops.aten.index.Tensor(table, indices)
    return found


def _wrapped(index: Interval, length: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and last entry of an index, and where it stays in the table; -1 is the last entry."""
    low, high = index.low, index.high
    inside = (low >= -length) & (high < length)
    before, after = high < 0, low >= 0
    first = torch.where(after, low, torch.where(before, low + length, 0.0))
    last = torch.where(after, high, torch.where(before, high + length, length - 1))
    first, last = (torch.where(inside, x, 0.0).to(torch.int64) for x in (first, last))
    return first, last, inside


class Ranges(NamedTuple):
    """Exact extremes over one axis of ``values [P, n]``, in O(1) reads a range.

    Level l at i holds the extreme of the 2 ** l entries from i on; blocks have levels too.
    """

    least: Tensor
    least_blocks: Tensor
    most: Tensor
    most_blocks: Tensor

    @staticmethod
    def of(values: Tensor) -> Ranges:
        return Ranges(*_levels(values, torch.minimum), *_levels(values, torch.maximum))

    def extremes(
        self, at: Tensor, first: Sequence[Tensor], last: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        ends = at, first[0], last[0]
        low = _folded(self.least, self.least_blocks, torch.minimum, *ends)
        return low, _folded(self.most, self.most_blocks, torch.maximum, *ends)


def _levels(values: Tensor, fold: Fold) -> tuple[Tensor, Tensor]:
    places = _doubled(values, _LEVELS + 1, fold)
    blocks = values.shape[1] // 2**_LEVELS + 1
    return places, _doubled(places[_LEVELS][:, :: 2**_LEVELS], blocks.bit_length(), fold)


def _folded(
    places: Tensor, blocks: Tensor, fold: Fold, at: Tensor, first: Tensor, last: Tensor
) -> Tensor:
    level = _log(last - first + 1).clamp(max=_LEVELS)
    ends = fold(
        entries(places, level, at, first), entries(places, level, at, last - _power(level) + 1)
    )
    # Those cover a range up to 64 wide; between the blocks of a wider one's ends lie whole blocks.
    start, stop = (first >> _LEVELS) + 1, (last >> _LEVELS) - 1
    between = stop >= start
    start = torch.where(between, start, 0)
    stop = torch.where(between, stop, 0)
    level = _log(stop - start + 1)
    middle = fold(
        entries(blocks, level, at, start), entries(blocks, level, at, stop - _power(level) + 1)
    )
    return torch.where(between, fold(ends, middle), ends)


def _doubled(values: Tensor, levels: int, fold: Fold) -> Tensor:
    """``[levels, P, n]``: extremes of the 1, 2, 4, … entries from each place on, to the end at most."""
    made = [values]
    for level in range(levels - 1):
        ahead = min(2**level, values.shape[1])
        last = made[-1][:, -1:].expand(-1, ahead)
        made.append(fold(made[-1], torch.cat([made[-1][:, ahead:], last], 1)))
    return torch.stack(made)


def _log(width: Tensor) -> Tensor:
    """floor(log2(width)) of a width from 1 up, exactly: the exponent of its fp64."""
    return (width.double().view(torch.int64) >> 52) - 1023


def _power(level: Tensor) -> Tensor:
    """2 ** level, as integers."""
    return torch.ones_like(level) << level


class Pyramid(NamedTuple):
    """Extremes over ranges of several axes of ``values [P, n, m, …]``, rounded out to few cells.

    ``low`` and ``high`` hold all levels on end: where each starts, its sizes, and the last level.
    """

    low: Tensor
    high: Tensor
    starts: Tensor
    sizes: Tensor
    top: Tensor

    @staticmethod
    def of(values: Tensor) -> Pyramid:
        levels = 1 + max((n - 1).bit_length() for n in values.shape[1:])
        low, high = [values], [values]
        for _ in range(levels - 1):
            low.append(_halved(low[-1], torch.amin))
            high.append(_halved(high[-1], torch.amax))
        starts = [sum(prod(x.shape[1:]) for x in low[:i]) for i in range(levels)]
        return Pyramid(
            torch.cat([x.flatten(1) for x in low], 1),
            torch.cat([x.flatten(1) for x in high], 1),
            torch.tensor(starts, device=values.device),
            torch.tensor([x.shape[1:] for x in low], device=values.device),
            torch.tensor(levels - 1, device=values.device),
        )

    def extremes(
        self, at: Tensor, first: Sequence[Tensor], last: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        width = last[0] - first[0]
        for a, b in zip(first[1:], last[1:], strict=True):
            width = torch.maximum(width, b - a)
        # Two neighbouring cells of size s hold every range up to s + 1 wide.
        level = torch.minimum(_log((width * 2 - 2).clamp(min=1)), self.top)
        start = entries(self.starts, level)
        low: Tensor | None = None
        high: Tensor | None = None
        for corner in product((first, last), repeat=len(first)):
            cell = torch.zeros_like(level)
            for axis, ends in enumerate(corner):
                cell = cell * entries(self.sizes[:, axis], level) + (ends[axis] >> level)
            a, b = (entries(side, at, start + cell) for side in (self.low, self.high))
            low = a if low is None else torch.minimum(low, a)
            high = b if high is None else torch.maximum(high, b)
        assert low is not None and high is not None
        return low, high


def _halved(values: Tensor, extreme: Callable[..., Tensor]) -> Tensor:
    """The extremes of neighbouring pairs along every axis but the first."""
    for axis in range(1, values.ndim):
        if values.shape[axis] % 2:
            values = torch.cat([values, values.narrow(axis, -1, 1)], axis)
        values = extreme(values.unflatten(axis, (-1, 2)), axis + 1)
    return values
