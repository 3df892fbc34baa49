"""Somebody else's attention over the problem of a row, on the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsparse.device.clock import graph_ms
from flexsparse.measure.contender import UnfitError
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.cost import first_line
from flexsparse.measure.delivery import modes
from flexsparse.measure.patience import bounded
from flexsparse.measure.timed import MODES, QKV

Single = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rival(NamedTuple):
    """``attend`` does all that stands before attention at every call and attends, ``ready`` attends
    over what was made before; both take ``qkv``, the problem's tensors in the rival's own form.

    ``note`` says what it is given and what of the problem it leaves out. ``back`` brings its output to
    ``[B, Hq, Q, Dv]``, None where it computes something else, so that nothing can be compared.
    """

    qkv: QKV
    attend: Single
    ready: Single
    note: str
    back: Callable[[Tensor], Tensor] | None = None
    no_backward: str | None = None


def rival(name: str, make: Callable[[Conversion], Rival], made: Conversion, patience: float) -> Any:
    """What a peer takes by mode, ``total`` and ``kernel`` in ms, for a decode step also ``graph``; how
    far its output is from ours where it computes the same; or in ``reason`` why there is nothing."""
    found: dict[str, Any] = {"name": name, "note": None, "reason": None, "difference": None}
    problem = made.problem
    try:
        with bounded(patience):
            other = make(made)
            with torch.no_grad():
                out = other.attend(*other.qkv)
            if problem.device.type == "cuda":
                torch.cuda.synchronize(problem.device)
        found["note"] = other.note
        if other.back is not None and made.qkv is not None:
            with torch.no_grad():
                ours = made.attend(*made.qkv)
                found["difference"] = float((other.back(out) - ours).abs().max())
        for mode in modes(made):
            if mode == "training" and other.no_backward:
                found[mode] = {"reason": other.no_backward}
                continue
            # A backward compiles too.
            with bounded(patience):
                found[mode] = _times(other, mode, made)
    except UnfitError as why:
        found["reason"] = str(why)
    except Exception as error:  # somebody else's code: its failure is a cell of the table
        found["reason"] = first_line(error)
    return found


def _times(other: Rival, mode: str, made: Conversion) -> dict[str, Any]:
    device = made.problem.device
    timed = MODES[mode]
    total = timed(other.attend, other.qkv, device)
    found: dict[str, Any] = {"total": total, "kernel": timed(other.ready, other.qkv, device)}
    if made.problem.scores is not None and device.type == "cuda":
        try:
            with torch.no_grad():
                found["graph"] = graph_ms(lambda: other.ready(*other.qkv))
        except Exception as error:  # whatever torch or CUDA finds while it captures
            found["no_graph"] = first_line(error)
    return found
