"""What it costs to ask for single keys: beside the same tiles where every pair of a block counts."""

from __future__ import annotations

from typing import Any

from flexsparse.choice import BackendName, Pack
from flexsparse.measure.conversion import Conversion, conversion
from flexsparse.measure.delivery import modes
from flexsparse.measure.timed import MODES

Found = dict[str, Any]


def membership(
    made: Conversion, attention: Found, seed: int, backend: BackendName, pack: Pack | None
) -> Found:
    """By mode ``whole_ms``, the kernel over the blocks that the keys lie in, and ``over``, how many times
    that ours takes; ``by`` whom, and the ``physical_pairs`` of ours and of that."""
    problem = made.problem
    assert problem.whole is not None
    whole = conversion(problem.whole, attention=True, seed=seed, backend=backend, pack=pack)
    assert whole.qkv is not None and whole.plan is not None
    pairs = [c.layout_of_plan.budget().physical_pairs for c in (made, whole)]
    found: Found = {"by": whole.plan.backend, "physical_pairs": pairs}
    for mode in modes(made):
        ms = MODES[mode](whole.attend, whole.qkv, problem.device)
        found[mode] = {"whole_ms": ms, "over": attention[mode]["time_ms"]["kernel"] / ms}
    return found
