"""Attention on the clock: forward, or forward and backward; and torch's dense attention by it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexsparse.device.clock import Call, captured_ms, device_ms
from flexsparse.measure.contender import UnfitError
from flexsparse.measure.cost import first_line

QKV = tuple[Tensor, Tensor, Tensor]
# Its output, or several that lie end to end.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, ...]]
Timed = Callable[[Attention, QKV, torch.device], float]

KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def forward_ms(attend: Attention, qkv: QKV, device: torch.device) -> float:
    with torch.no_grad():
        return device_ms(lambda: attend(*qkv), device)


def kernel_ms(attend: Attention, qkv: QKV, device: torch.device) -> float:
    """Of a forward call what the device takes: in a CUDA graph where one holds it, as the launches of a
    short call take the host longer."""
    with torch.no_grad():
        captured = captured_ms(lambda: attend(*qkv)) if device.type == "cuda" else None
    return forward_ms(attend, qkv, device) if captured is None else captured


def training_ms(attend: Attention, qkv: QKV, device: torch.device) -> float:
    return device_ms(training(attend, qkv), device)


def training(attend: Attention, qkv: QKV) -> Call:
    """Forward and backward of a sum, as a call."""
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    flow = torch.ones_like(q)

    def call() -> object:
        out = attend(q, k, v)
        if isinstance(out, Tensor):
            return torch.autograd.grad(out, (q, k, v), flow)
        flows = flow.split([part.shape[2] for part in out], 2)
        return torch.autograd.grad(out, (q, k, v), flows)

    return call


MODES: dict[str, Timed] = {"forward": forward_ms, "training": training_ms}


def sdpa(causal: bool, heads: tuple[int, int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's dense attention."""
    grouped = heads[0] != heads[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return attend


def by_kernel(
    attend: Attention, qkv: QKV, device: torch.device, timed: Timed
) -> dict[str, float | str]:
    """ms of a call of torch's dense attention with each of its kernels, or why one does not run."""
    if device.type != "cuda":
        return {"torch SDPA": timed(attend, qkv, device)}
    found: dict[str, float | str] = {}
    for name, kernel in KERNELS.items():
        try:
            with sdpa_kernel(kernel):
                found[name] = timed(attend, qkv, device)
        except RuntimeError as error:
            found[name] = first_line(error)
    return found


def fastest(found: dict[str, float | str]) -> tuple[float, str]:
    """The best of what ran, and who it was."""
    ms = [(time, name) for name, time in found.items() if isinstance(time, float)]
    if not ms:
        raise UnfitError(f"no dense attention of torch runs here: {found}")
    return min(ms)
