"""A rule asked at the corners of tiles: one seen and one hidden settle that a tile is partial."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flexsparse.intervals.tables import entries
from flexsparse.intervals.verdicts import Place, compiled

# Integers that a fused kernel and the host count alike; of floats and narrower integers no corner is
# believed, as a kernel may round or wrap them elsewhere than the host does.
_ALIKE = frozenset({torch.bool, torch.int32, torch.int64})
_DIVIDES = frozenset({"floor_divide", "div", "remainder", "fmod"})


class Corners:
    """The code of a rule at single pairs, safe at every pair: what would fail there gives anything.

    ``lengths`` are those of the axes of each of ``tables``.
    """

    def __init__(
        self, code: str, tables: Sequence[Tensor], lengths: Sequence[Sequence[int | Tensor]]
    ) -> None:
        self.believed = all(t.dtype in _ALIKE for t in tables)
        self._tables = [
            _Guarded(t, n) if t.ndim else t for t, n in zip(tables, lengths, strict=True)
        ]
        scope: dict[str, Any] = {"torch": _Torch(self)}
        exec(compiled(code), scope)
        self._mod = scope["mod"]

    def mixed(self, place: Place) -> Tensor:
        """bool ``[n]``: of which tiles some corner is seen and another hidden.

        False wherever the rule computes what is not believed.
        """
        none = torch.zeros_like(place.b, dtype=torch.bool)
        some, every = none, ~none
        for q, kv in product(place.q, place.kv):
            seen = self._mod(place.b, place.h, q, kv, *self._tables)
            some, every = some | seen, every & seen
        return some & ~every if self.believed else none


class _Guarded:
    """A table that is never read outside of itself."""

    def __init__(self, tensor: Tensor, lengths: Sequence[int | Tensor]) -> None:
        self._tensor = tensor
        self._lengths = lengths

    def __getitem__(self, indices: Tensor | tuple[Tensor, ...]) -> Tensor:
        given = indices if isinstance(indices, tuple) else (indices,)
        inside = []
        for index, length in zip(given, self._lengths, strict=True):
            at = index.to(torch.int64)
            at = torch.where(at < 0, at + length, at)
            inside.append(torch.where((at >= 0) & (at < length), at, 0))
        return entries(self._tensor, *inside)


class _Torch:
    """``torch`` as the code sees it: no integer is divided by zero."""

    def __init__(self, corners: Corners) -> None:
        self.ops = _Operator(torch.ops, corners)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Operator:
    def __init__(self, real: Any, corners: Corners) -> None:
        self._real = real
        self._corners = corners

    def __getattr__(self, name: str) -> _Operator:
        return _Operator(getattr(self._real, name), self._corners)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if str(self._real.overloadpacket).removeprefix("aten.") in _DIVIDES:
            args = (args[0], _not_zero(args[1]), *args[2:])
        result: Tensor = self._real(*args, **kwargs)
        self._corners.believed &= result.dtype in _ALIKE
        return result


def _not_zero(divisor: Any) -> Any:
    if isinstance(divisor, Tensor):
        if divisor.is_floating_point():
            return divisor
        return torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    return divisor or 1
