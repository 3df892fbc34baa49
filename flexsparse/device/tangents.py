"""Forward-mode derivatives: tangents that tensors carry along, which kernels drop."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def tangents_there() -> bool:
    """Whether a tensor may carry one."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def has_tangent(x: object) -> bool:
    return tangents_there() and isinstance(x, Tensor) and forward_ad.unpack_dual(x)[1] is not None
