"""A bound on somebody else's first call, which may tune and compile for minutes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flexsparse.measure.contender import UnfitError


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises `UnfitError` in a block that takes longer, as soon as Python has its turn.

    Signals reach the main thread alone; elsewhere there is no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise UnfitError(f"its first call took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
