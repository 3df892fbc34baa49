"""One number known by its bounds: what a line of a rule can be over all the pairs of a tile.

Bounds are fp64, which holds every 32-bit integer and every value of the narrower floats. Kernels count
in 32 bits and the host in 64, kernels fuse a product with its sum and the host does not: a number
is known only where all of them agree on it up to the widening done here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# From here on fp64 no longer holds every integer.
LARGEST_EXACT = 2.0**53
_PLAIN = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True, eq=False)
class Interval:
    """``low <= x <= high`` for each tile, or both NaN where nothing is known; fp64, broadcastable.

    A bool is 0 or 1, and unknown as [0, 1]. ``like`` is a meta tensor of the type and rank that torch
    computes with. ``point`` says that ``x`` depends on batch and head alone, and so varies in no tile.
    """

    low: Tensor
    high: Tensor
    like: Tensor
    point: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.low.device


def ranged(low: Tensor, high: Tensor) -> Interval:
    """Positions from ``low`` to ``high``, int64 as the host counts them."""
    return Interval(low.double(), high.double(), _like(torch.int64), False)


def exactly(index: Tensor) -> Interval:
    """A batch or head index, which each tile has one of."""
    value = index.double()
    return Interval(value, value, _like(torch.int64), True)


def constant(
    value: bool | int | float, device: torch.device, like: Tensor | None = None
) -> Interval:
    """A number that is the same in all tiles."""
    if like is None:
        like = torch.empty((), dtype=_PLAIN[type(value)], device="meta")
    exact = isinstance(value, float) or abs(value) <= LARGEST_EXACT
    bound = torch.full((), float(value) if exact else torch.nan, dtype=torch.float64, device=device)
    return Interval(bound, bound, like, True)


def captured(number: Tensor) -> Interval:
    """A tensor of one number."""
    like = torch.empty((), dtype=number.dtype, device="meta")
    known = torch.ones((), dtype=torch.bool, device=number.device)
    return replace(among(number, number, number.dtype, known, True), like=like)


def unknown(like: Tensor, device: torch.device) -> Interval:
    """A number of which nothing is known."""
    bounds = (0.0, 1.0) if like.dtype == torch.bool else (torch.nan, torch.nan)
    low, high = (torch.full((), x, dtype=torch.float64, device=device) for x in bounds)
    return Interval(low, high, like, False)


def among(low: Tensor, high: Tensor, dtype: torch.dtype, known: Tensor, point: bool) -> Interval:
    """Values read from a table of ``dtype``, where ``known``."""
    bounds = [low.double(), high.double()]
    if not dtype.is_floating_point:
        known = known & (bounds[0].abs() <= LARGEST_EXACT) & (bounds[1].abs() <= LARGEST_EXACT)
    least, most = (0.0, 1.0) if dtype == torch.bool else (torch.nan, torch.nan)
    return Interval(
        torch.where(known, bounds[0], least),
        torch.where(known, bounds[1], most),
        _like(dtype),
        point,
    )


def computed(x: Interval) -> Interval:
    """``x`` as arithmetic gives it: widened by the rounding, unknown where it overflows."""
    low, high, dtype = x.low, x.high, x.dtype
    if dtype == torch.bool:
        return replace(x, low=low.clamp(0, 1), high=high.clamp(0, 1))
    if dtype.is_floating_point:
        low, high = _outward(low, -1, dtype), _outward(high, 1, dtype)
        largest = torch.finfo(dtype).max / 2
        held = (low > -largest) & (high < largest)
    else:
        held = _fits(low, high, dtype)
    return replace(
        x, low=torch.where(held, low, torch.nan), high=torch.where(held, high, torch.nan)
    )


def cast(x: Interval, dtype: torch.dtype) -> Interval:
    """``x`` in another type, as torch converts it."""
    if x.dtype == dtype:
        return x
    like = x.like.to(dtype)
    low, high = x.low, x.high
    if dtype == torch.bool:
        zero = (low == 0) & (high == 0)
        nonzero = (low > 0) | (high < 0)
        return Interval(nonzero.double(), (~zero).double(), like, x.point)
    if dtype.is_floating_point:
        exact = _holds(low, dtype), _holds(high, dtype)
        largest = torch.finfo(dtype).max / 2
        known = (exact[0] | (low.abs() < largest)) & (exact[1] | (high.abs() < largest))
        low = torch.where(exact[0], low, _outward(low, -1, dtype))
        high = torch.where(exact[1], high, _outward(high, 1, dtype))
    elif x.dtype.is_floating_point:
        low, high = low.trunc(), high.trunc()
        known = _fits(low, high, dtype)
    elif dtype == torch.int64:
        known = low == low
    else:
        known = _fits(low, high, dtype)
    return Interval(
        torch.where(known, low, torch.nan), torch.where(known, high, torch.nan), like, x.point
    )


def _fits(low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether integers stay within ``dtype`` and within the 32 bits of a kernel's positions."""
    least = max(torch.iinfo(dtype).min, -(2**31))
    most = min(torch.iinfo(dtype).max, 2**31 - 1)
    return (low >= least) & (high <= most)


def _holds(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a float type has the number itself. Asked of its bits: to convert there and back is what
    a compiler may leave out."""
    if dtype == torch.float64:
        return bound == bound
    info = torch.finfo(dtype)
    spare = 2**52 * info.eps - 1
    short = bound.view(torch.int64) & int(spare) == 0
    size = bound.abs()
    return (short & (size >= info.tiny) & (size <= info.max)) | (bound == 0) | (size == torch.inf)


def _outward(bound: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """``bound`` moved by more than an operation in ``dtype`` rounds; zero stays: it is exact."""
    if dtype == torch.float64:
        return bound + side * (bound.abs() * 1e-15 + 1e-300)
    info = torch.finfo(dtype)
    return torch.where(bound == 0, bound, bound + side * (bound.abs() * 4 * info.eps + info.tiny))


def _like(dtype: torch.dtype) -> Tensor:
    return torch.empty(1, dtype=dtype, device="meta")
