"""What a backward of our own says to whoever differentiates it again."""

from __future__ import annotations

from typing import Any, NoReturn

from flexsparse.errors import BackendError


def refuse_twice(ctx: Any, *grads: Any) -> NoReturn:
    raise BackendError(
        "gradients of gradients: no backend computes them, as each recomputes its scores in a backward of "
        "its own; differentiate fs.reference twice, or attend with torch alone where you need them"
    )
