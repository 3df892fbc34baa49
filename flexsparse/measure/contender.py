"""What stands beside this library in a row: a call of the same run, or why there is none."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsparse.device.clock import Call


class UnfitError(Exception):
    """Why a baseline does not run on a problem."""


class Contender(NamedTuple):
    """``call`` does the work and gives what it made; ``note`` says what of the problem it leaves out,
    or what it is given that others must make; ``no_graph`` why no CUDA graph can hold it."""

    call: Call
    note: str
    no_graph: str | None = None


def installed(module: str, package: str) -> Any:
    """A module of ``package``, or why it is not there."""
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        raise UnfitError(
            f"{package} is not installed" if missing else f"{package} does not import: {error}"
        ) from None


def scattered(indices: Tensor, columns: int) -> Tensor:
    """bool ``[B, H, R, columns]`` of indices within them, -1 for none."""
    # One column more, for what is no candidate.
    present = torch.zeros(
        (*indices.shape[:3], columns + 1), dtype=torch.bool, device=indices.device
    )
    slot = torch.where(indices < 0, columns, indices).to(torch.int64)
    return present.scatter_(-1, slot, True)[..., :columns]
