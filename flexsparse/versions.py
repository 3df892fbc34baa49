"""Whether tensors still hold what they did: what was made from them is stale once they do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor


class Counted(Protocol):
    """What counts its changes, as a tensor does."""

    @property
    def _version(self) -> int: ...


_count = attrgetter("_version")


@dataclass(frozen=True, eq=False)
class Versions:
    """Tensors, and how often each had changed when something was made from them.

    Tensors of inference mode keep no count and are left out; so are all inside torch.compile. A copy
    speaks of the copied tensors, which count anew.
    """

    tensors: tuple[Counted, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(read: Iterable[object]) -> Versions:
        if torch.compiler.is_compiling():
            return Versions((), ())
        counted = [t for t in read if isinstance(t, Tensor) and not t.is_inference()]
        return Versions(tuple(counted), tuple([t._version for t in counted]))

    def and_of(self, held: Counted) -> Versions:
        if torch.compiler.is_compiling() or (isinstance(held, Tensor) and held.is_inference()):
            return self
        return Versions((*self.tensors, held), (*self.counts, held._version))

    def extends(self, other: Versions) -> bool:
        """Whether all that ``other`` speaks of is here too, and had changed as often."""
        known = list(zip(map(id, self.tensors), self.counts, strict=True))
        theirs = list(zip(map(id, other.tensors), other.counts, strict=True))
        return known[: len(theirs)] == theirs

    @property
    def current(self) -> bool:
        """Whether none has changed since."""
        if torch.compiler.is_compiling():
            return True
        return tuple(map(_count, self.tensors)) == self.counts

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "current": self.current}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counts = tuple(t._version if state["current"] else -1 for t in state["tensors"])
        vars(self).update(tensors=state["tensors"], counts=counts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Versions)
            and self.counts == other.counts
            and [id(t) for t in self.tensors] == [id(t) for t in other.tensors]
        )

    def __hash__(self) -> int:
        return hash((self.counts, *map(id, self.tensors)))
