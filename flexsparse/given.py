"""Candidates as they were given, in any order; their sets are made when somebody first asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.library import custom_op
from torch.utils._python_dispatch import _disable_current_modes

from flexsparse.device import lasting
from flexsparse.errors import SelectionError
from flexsparse.kernels.dedupe import sorted_unique

_CHANGED = (
    "the indices of this Selection have changed in place since from_indices, before their sets were "
    "made: make the Selection anew, or read select.indices once before changing them"
)
_NOT_IN_GRAPH = (
    "this Selection was made outside the CUDA graph that first asks for its sets, and each replay would "
    "read its indices anew: read select.indices once before the capture, or make the Selection inside"
)


class Given:
    """``tensor [B, H, R, K]`` int32 or int64, of which the numbers in [0, limit) count.

    A change in place before the sets were made is an error when they are asked for. What was given
    inside a CUDA graph is what the tensor holds whenever it is read, as for the graph itself.
    """

    def __init__(self, tensor: Tensor, limit: int, width: int) -> None:
        self.limit = limit
        self.shape = torch.Size((*tensor.shape[:3], width))
        self.device = tensor.device
        self.captured = _capturing(tensor.device)
        self._tensor: Tensor | None = tensor
        self._sets: Tensor | None = None
        self._made_at = 0
        self._count = tensor._version

    @staticmethod
    def may_wait(tensor: Tensor) -> bool:
        """Whether sets may not be needed, the host will see it if ``tensor`` changes, and nobody looks
        for what is computed."""
        if torch.compiler.is_compiling() or not Given.spares(tensor):
            return False
        return type(tensor) is Tensor and not (tensor.is_inference() or _watched())

    @staticmethod
    def spares(tensor: Tensor) -> bool:
        """Whether there are kernels that need no sets of it. Elsewhere numpy, too, may write there."""
        return tensor.is_cuda

    @property
    def _version(self) -> int:
        """How often the sets have changed; what is made of the tensor as it was given stays right."""
        return (
            self._count if self._sets is None else self._count + self._sets._version - self._made_at
        )

    @property
    def current(self) -> bool:
        """Whether nothing has changed since it was given."""
        tensor = self._tensor
        if tensor is not None:
            return self.captured or tensor._version == self._count
        return self._version == self._count

    @property
    def tensor(self) -> Tensor | None:
        """As it was given; None where there are sets."""
        tensor = self._tensor
        if tensor is None or self.captured:
            return tensor
        if not self.current:
            raise SelectionError(_CHANGED)
        if _capturing(self.device):
            raise SelectionError(_NOT_IN_GRAPH)
        return tensor

    @property
    def sets(self) -> Tensor:
        """int32 ``[B, H, R, width]``: unique, rising, then -1."""
        if torch.compiler.is_compiling():
            return self._traced()
        with _ONE_AT_A_TIME:
            return self._made_once()

    def _made_once(self) -> Tensor:
        tensor = self.tensor
        if tensor is None:
            assert self._sets is not None
            return self._sets
        with _plainly() if _transformed() else nullcontext():
            made = _made(tensor, self.limit, self.shape[-1])
        if self.captured and not _capturing(self.device):
            return made
        if tensor.is_cuda and not self.captured:
            # Let go below, though another stream than its own may still read it.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._made_at, self._sets = made._version, made
        self._tensor = None
        return made

    @property
    def keeps(self) -> bool:
        """Whether the sets that were made are those for good."""
        return self._tensor is None

    def _traced(self) -> Tensor:
        if self._sets is not None:
            return self._sets
        assert self._tensor is not None
        made: Tensor = counted_sets(self._tensor, self.limit, self.shape[-1], self._count)
        return made

    def __getstate__(self) -> dict[str, Any]:
        # Once loaded it counts anew.
        sets, current = self.sets, self.current
        state = {"_tensor": None, "_sets": sets, "_made_at": 0, "_count": 0 if current else -1}
        return vars(self) | state | {"captured": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _made_at=state["_sets"]._version, device=state["_sets"].device)


# Threads that ask at once are given the same sets.
_ONE_AT_A_TIME = RLock()


def _watched() -> bool:
    """Whether a transform or a mode sees what is computed."""
    return bool(torch._C._len_torch_dispatch_stack()) or _transformed()


def _transformed() -> bool:
    """Whether what is computed is a transform's or a tracer's own."""
    modes = (torch._C._get_dispatch_mode(kind) for kind in _TRACERS)
    return bool(torch._C._functorch.peek_interpreter_stack()) or any(modes)


_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


@contextmanager
def _plainly() -> Iterator[None]:
    """Sets outlive the transform or tracer under which somebody first asks."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


@lasting
def _made(tensor: Tensor, limit: int, width: int) -> Tensor:
    return sorted_unique(tensor, limit, width)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@custom_op("flexsparse::counted_sets", mutates_args=())
def counted_sets(indices: Tensor, limit: int, width: int, count: int) -> Tensor:
    """The sets of indices that were given outside a compiled region, which must not have changed.

    A copy that a compiler reads in their place has changed less often. A graph that is captured reads
    them at each replay.
    """
    if indices._version > count and not _capturing(indices.device):
        raise SelectionError(_CHANGED)
    return sorted_unique(indices, limit, width)


@counted_sets.register_fake
def _(indices: Tensor, limit: int, width: int, count: int) -> Tensor:
    return indices.new_empty((*indices.shape[:-1], width), dtype=torch.int32)
