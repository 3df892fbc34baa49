"""A kernel past the guards of its compilation, for calls of one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard

from flexsparse.backends.compiled import Kernel, Marked, flat
from flexsparse.device.unguarded import Way, guarded


class Direct:
    """The guards judge a first call, and any other while a mode of torch's is active or a global setting
    is another than in that call: compiled code depends on these.

    Of q, k, v, lists and tables all calls have the same shapes, strides, types and devices.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._way: Way | None = None
        self._settings: GlobalStateGuard | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], tables: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        plain = not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())
        settings = self._settings
        if settings is None and plain:
            return self._first(q, k, v, lists, tables)
        if self._way is None or settings is None or not plain or not settings.check():
            out, lse = self._kernel(q, k, v, lists, tables, [])
            return out, lse
        out, *more = self._way((q, k, v, *lists, *tables))
        return out, more[0] if more else None

    def _first(
        self, q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], tables: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        self._settings = GlobalStateGuard()
        kernel = self._kernel
        call: tuple[Any, ...] = (q, k, v, lists, tables, [])
        if isinstance(kernel, Marked):
            # The guards see the views that carry the marks.
            call = kernel.marked(call)
            kernel = kernel.compiled
        found: tuple[Tensor, Tensor | None]
        found, self._way = guarded(lambda: kernel(*call), flat(call), _parts)
        return found


def _parts(found: tuple[Tensor, Tensor | None]) -> Sequence[Tensor]:
    out, lse = found
    return (out,) if lse is None else (out, lse)
