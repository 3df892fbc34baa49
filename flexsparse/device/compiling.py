"""What was compiled: a kernel costs seconds, so each is counted."""

from __future__ import annotations


class CompileCounter:
    """Every kernel that was compiled in this process, by its kind."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def note(self, kind: str) -> None:
        self.kinds.append(kind)

    def __int__(self) -> int:
        return len(self.kinds)


compiles = CompileCounter()
