"""Rows of a tensor in another order, and back again in its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("flexsparse::reorder", mutates_args=())
def reorder(x: Tensor, place: Tensor, inverse: Tensor) -> Tensor:
    """``x [B, H, N, D]`` at ``place [B or 1, H or 1, N]``, of which ``inverse`` is the inverse."""
    if x.is_cuda:
        from flexsparse.kernels import triton_pieces

        return triton_pieces.take(x, place, ahead=False)
    at = place.to(torch.int64).expand(*x.shape[:2], -1)[..., None]
    return x.gather(2, at.expand(-1, -1, -1, x.shape[-1]))


@reorder.register_fake
def _(x: Tensor, place: Tensor, inverse: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    place, inverse = ctx.saved_tensors
    return reorder(grad, inverse, place), None, None


reorder.register_autograd(_back, setup_context=_keep)
