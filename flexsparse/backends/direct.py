"""A kernel past the guards of its compilation, for calls of one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch.utils._device import DeviceContext

from flexsparse.backends.compiled import Kernel, Marked, flat
from flexsparse.device.unguarded import Unguarded, guarded


class _Known(NamedTuple):
    """What ran, and torch's global settings at that time: compiled code depends on these."""

    settings: GlobalStateGuard
    run: Unguarded


class Direct:
    """The guards judge a first call, and any other while a mode of torch's is active or a setting is
    another than when they were asked last.

    Of q, k, v, lists and tables all calls have the same shapes, strides, types and devices, and none
    wants gradients.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._known: _Known | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], tables: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        if _modes():
            out, lse = self._kernel(q, k, v, lists, tables, [])
            return out, lse
        known = self._known
        if known is None or not known.settings.check():
            return self._asked((q, k, v, lists, tables, []))
        out, *more = known.run((q, k, v, *lists, *tables))
        return out, more[0] if more else None

    def _asked(self, call: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        kernel = self._kernel
        if isinstance(kernel, Marked):
            # The guards see the views that carry the marks.
            call = kernel.marked(call)
            kernel = kernel.compiled
        settings = GlobalStateGuard()
        found: tuple[Tensor, Tensor | None]
        found, run = guarded(lambda: kernel(*call), flat(call), _parts)
        self._known = None if run is None else _Known(settings, run)
        return found


def _modes() -> bool:
    """Whether a mode would see what is called, or torch was told to run nothing compiled; a default
    device changes nothing of it."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._dynamo.eval_frame._stance.stance == "force_eager"
    ):
        return True
    count = torch._C._len_torch_function_stack()
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(count))


def _parts(found: tuple[Tensor, Tensor | None]) -> Sequence[Tensor]:
    out, lse = found
    return (out,) if lse is None else (out, lse)
