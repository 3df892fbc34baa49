"""Parts whose intermediate results a backward computes again, of what the forward read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexsparse.errors import BackendError
from flexsparse.versions import Versions

R = TypeVar("R", Tensor, tuple[Tensor, ...])


def recomputed(part: Callable[..., R], read: Sequence[Tensor], *args: Any) -> R:
    """``part(*args)``, and in backward once more.

    Where a tensor of ``read`` or ``args`` has been changed in place by then that is an error, as with
    what torch itself keeps for a backward.
    """
    versions = Versions.of((*read, *args))

    def again(*args: Any) -> R:
        if not versions.current:
            raise BackendError(
                "a tensor that attention read has been changed in place before its backward, which computes "
                "scores again: change a copy"
            )
        return part(*args)

    made: R = checkpoint(again, *args, use_reentrant=False)
    return made
