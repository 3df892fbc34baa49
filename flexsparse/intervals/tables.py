"""What a captured table can give over a range of its indices: range minimum and maximum.

Batch and head indices pick one entry. An axis that is read over a range has prefix structures: exact
for one such axis (a sparse table over all entries up to 32 wide, and one over blocks of 32), and for
several axes a pyramid of halvings, whose answer holds and may be wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from flexsparse.intervals.interval import Interval, among

# Widths up to 2 ** 5 have an entry for every place; wider ones for every block of as many.
_LEVELS = 5
# A table of more entries has a pyramid: two copies instead of six.
_LARGE = 2**24
# Types in which torch finds the smaller of two everywhere; any other is kept as fp64.
_ORDERED = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)

Fold = Callable[[Tensor, Tensor], Tensor]


class Table:
    """A captured tensor that is indexed by intervals, as the code of a rule does."""

    def __init__(self, tensor: Tensor, may_fail: Callable[[Tensor], None]) -> None:
        self.tensor = tensor.detach()
        self.may_fail = may_fail
        self._kept: dict[tuple[int, ...], Ranges | Pyramid] = {}

    def __getitem__(self, indices: Interval | tuple[Interval, ...]) -> Interval:
        given = indices if isinstance(indices, tuple) else (indices,)
        known: Tensor | None = None
        ends: list[tuple[Tensor, Tensor]] = []
        for index, length in zip(given, self.tensor.shape, strict=True):
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
        at = self._place(points, [ends[i][0] for i in points])
        if not ranged:
            entry = self.tensor.reshape(-1)[at]
            return among(entry, entry, self.tensor.dtype, known, True)
        first = torch.broadcast_tensors(*(ends[i][0] for i in ranged))
        last = torch.broadcast_tensors(*(ends[i][1] for i in ranged))
        low, high = self._over(points, ranged).extremes(at, first, last)
        return among(low, high, self.tensor.dtype, known, False)

    def _place(self, axes: tuple[int, ...], indices: Sequence[Tensor]) -> Tensor:
        """Where the entry at ``indices`` of ``axes`` stands among all of those axes."""
        at = torch.zeros((), dtype=torch.int64, device=self.tensor.device)
        for axis, index in zip(axes, indices, strict=True):
            at = at * self.tensor.shape[axis] + index
        return at

    def _over(self, points: tuple[int, ...], ranged: tuple[int, ...]) -> Ranges | Pyramid:
        if ranged not in self._kept:
            sizes = [self.tensor.shape[i] for i in ranged]
            values = self.tensor.permute(*points, *ranged).reshape(-1, *sizes)
            if values.dtype == torch.bool:
                values = values.to(torch.uint8)
            elif values.dtype not in _ORDERED:
                values = values.double()
            exact = len(ranged) == 1 and values.numel() <= _LARGE
            self._kept[ranged] = Ranges(values) if exact else Pyramid(values)
        return self._kept[ranged]


def _wrapped(index: Interval, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last entry of an index, and where it stays in the table; -1 is the last entry."""
    low, high = index.low, index.high
    inside = (low >= -length) & (high < length)
    before, after = high < 0, low >= 0
    first = torch.where(after, low, torch.where(before, low + length, 0.0))
    last = torch.where(after, high, torch.where(before, high + length, length - 1.0))
    first, last = (torch.where(inside, x, 0.0).to(torch.int64) for x in (first, last))
    return first, last, inside


class Ranges:
    """Exact extremes over one axis of ``values [P, n]``, in O(1) reads a range."""

    def __init__(self, values: Tensor) -> None:
        self._sides = [_Side(values, torch.minimum), _Side(values, torch.maximum)]

    def extremes(
        self, at: Tensor, first: Sequence[Tensor], last: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        low, high = (side.over(at, first[0], last[0]) for side in self._sides)
        return low, high


class _Side:
    """Level l at i holds the extreme of the 2 ** l entries from i on; blocks have levels too."""

    def __init__(self, values: Tensor, fold: Fold) -> None:
        self.fold = fold
        self.places = _doubled(values, _LEVELS + 1, fold)
        blocks = values.shape[1] // 2**_LEVELS + 1
        each = self.places[_LEVELS][:, :: 2**_LEVELS]
        self.blocks = _doubled(each, blocks.bit_length(), fold)

    def over(self, at: Tensor, first: Tensor, last: Tensor) -> Tensor:
        level = _log(last - first + 1).clamp(max=_LEVELS)
        ends = self.fold(self.places[level, at, first], self.places[level, at, last - 2**level + 1])
        # Those cover a range up to 64 wide; between the blocks of a wider one's ends lie whole blocks.
        start, stop = (first >> _LEVELS) + 1, (last >> _LEVELS) - 1
        between = stop >= start
        start = torch.where(between, start, 0)
        stop = torch.where(between, stop, 0)
        level = _log(stop - start + 1)
        middle = self.fold(
            self.blocks[level, at, start], self.blocks[level, at, stop - 2**level + 1]
        )
        return torch.where(between, self.fold(ends, middle), ends)


def _doubled(values: Tensor, levels: int, fold: Fold) -> Tensor:
    """``[levels, P, n]``: extremes of the 1, 2, 4, … entries from each place on, to the end at most."""
    made = [values]
    for level in range(levels - 1):
        ahead = min(2**level, values.shape[1])
        last = made[-1][:, -1:].expand(-1, ahead)
        made.append(fold(made[-1], torch.cat([made[-1][:, ahead:], last], 1)))
    return torch.stack(made)


def _log(width: Tensor) -> Tensor:
    """floor(log2(width)), exactly."""
    return (torch.frexp(width.double()).exponent - 1).to(torch.int64)


class Pyramid:
    """Extremes over ranges of several axes of ``values [P, n, m, …]``, rounded out to few cells."""

    def __init__(self, values: Tensor) -> None:
        self.levels = 1 + max((n - 1).bit_length() for n in values.shape[1:])
        low, high = [values], [values]
        for _ in range(self.levels - 1):
            low.append(_halved(low[-1], torch.amin))
            high.append(_halved(high[-1], torch.amax))
        self.sizes = torch.tensor([x.shape[1:] for x in low], device=values.device)
        self.starts = torch.tensor(
            [sum(prod(x.shape[1:]) for x in low[:i]) for i in range(self.levels)],
            device=values.device,
        )
        self._low, self._high = (torch.cat([x.flatten(1) for x in side], 1) for side in (low, high))

    def extremes(
        self, at: Tensor, first: Sequence[Tensor], last: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        width = torch.stack([b - a for a, b in zip(first, last, strict=True)]).amax(0)
        # Two neighbouring cells of size s hold every range up to s + 1 wide.
        level = torch.frexp((width - 1).clamp(min=0).double()).exponent.to(torch.int64)
        level = level.clamp(max=self.levels - 1)
        start, sizes = self.starts[level], self.sizes[level].unbind(-1)
        low: Tensor | None = None
        high: Tensor | None = None
        for corner in product((first, last), repeat=len(first)):
            cell = torch.zeros_like(level)
            for axis, (ends, size) in enumerate(zip(corner, sizes, strict=True)):
                cell = cell * size + (ends[axis] >> level)
            a, b = self._low[at, start + cell], self._high[at, start + cell]
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
