"""Traced code compiled for any lengths, and called past torch's guards in forms that they let through.

Of global settings, such as autocast, the guards ask too, but code of comparisons and fp64 does not
depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config

from flexsparse.device import compiled_alone
from flexsparse.device.unguarded import Unguarded, backend, guarded

# Forms kept of each kernel: where stretches are counted by the device, each call may have its own.
MOST = 64


def as_kernel(code: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Code of tensors that makes one, compiled when it first runs, for any lengths."""
    settings: Any = _config
    known: dict[tuple[object, ...], Unguarded] = {}
    compiled = compiled_alone(code, dynamic=True, backend=backend())

    def kernel(*args: Tensor) -> Tensor:
        form = tuple([_form(x) for x in args])
        if (direct := known.get(form)) is not None:
            return direct(args)[0]
        # Lengths that happen to be the same need not be so again.
        with torch.no_grad(), settings.patch(use_duck_shape=False):
            found: Tensor
            found, new = guarded(lambda: compiled(*args), args, lambda found: (found,))
        if new is not None:
            if len(known) >= MOST:
                known.clear()
            known[form] = new
        return found

    return kernel


def _form(x: Tensor) -> tuple[object, ...]:
    """All that guards and compiled code ask of a tensor, but for what it holds."""
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15
