"""Whether tensors still hold what they did: what was made from them is stale once they do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Counted(Protocol):
    """What counts its changes, as a tensor does."""

    @property
    def _version(self) -> int: ...


State = tuple[object, ...]


class Writes:
    """How often the tensors of a layout have been written anew, by it or by another that shares them."""

    _version = 0

    def count(self) -> None:
        # Compiled code would compile again for each number.
        if not torch.compiler.is_compiling():
            self._version += 1


def state_of(held: Counted) -> State:
    """How often it has changed, and what of a tensor another ``.data`` changes without a count."""
    if not isinstance(held, Tensor):
        return (held._version,)
    return held._version, held.data_ptr(), held.shape, held.stride(), held.dtype


@dataclass(frozen=True, eq=False)
class Versions:
    """Tensors, and the state in which each was when something was made from them.

    Tensors of inference mode keep no count and are left out; so are all inside torch.compile. A copy
    speaks of the copied tensors, which count anew.
    """

    tensors: tuple[Counted, ...]
    states: tuple[State, ...]

    @staticmethod
    def of(read: Iterable[object]) -> Versions:
        if torch.compiler.is_compiling():
            return Versions((), ())
        counted = [t for t in read if isinstance(t, Tensor) and not t.is_inference()]
        return Versions(tuple(counted), tuple([state_of(t) for t in counted]))

    def and_of(self, held: Counted) -> Versions:
        if torch.compiler.is_compiling() or (isinstance(held, Tensor) and held.is_inference()):
            return self
        return Versions((*self.tensors, held), (*self.states, state_of(held)))

    def instead(self, old: Counted, new: Counted) -> Versions:
        """The same of ``new`` in the place of ``old``, as current as that was."""
        held = [new if t is old else t for t in self.tensors]
        states = [
            state_of(new) if t is old and state == state_of(old) else state
            for t, state in zip(self.tensors, self.states, strict=True)
        ]
        return Versions(tuple(held), tuple(states))

    def knows(self, held: Counted) -> bool:
        """Whether ``held`` is in the state it was in."""
        return any(
            t is held and state_of(t) == state
            for t, state in zip(self.tensors, self.states, strict=True)
        )

    def extends(self, other: Versions) -> bool:
        """Whether all that ``other`` speaks of is here too, and was in the same state."""
        known = list(zip(map(id, self.tensors), self.states, strict=True))
        theirs = list(zip(map(id, other.tensors), other.states, strict=True))
        return known[: len(theirs)] == theirs

    @property
    def current(self) -> bool:
        """Whether none has changed since."""
        return torch.compiler.is_compiling() or self.unchanged

    @property
    def unchanged(self) -> bool:
        """The same, outside torch.compile."""
        return tuple([state_of(t) for t in self.tensors]) == self.states

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "current": self.current}

    def __setstate__(self, state: dict[str, Any]) -> None:
        states = tuple(state_of(t) if state["current"] else () for t in state["tensors"])
        vars(self).update(tensors=state["tensors"], states=states)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Versions)
            and self.states == other.states
            and [id(t) for t in self.tensors] == [id(t) for t in other.tensors]
        )

    def __hash__(self) -> int:
        return hash((self.states, *map(id, self.tensors)))
