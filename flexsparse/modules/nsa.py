"""Native Sparse Attention: compressed keys, selected blocks and a window, joined by learned gates.

Source: Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
2025, 3.2 and 3.3, equations 5 to 12 and figure 2, https://arxiv.org/abs/2502.11089.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from einops import rearrange
from torch import Tensor, nn

from flexsparse.attention import attention
from flexsparse.choice import BackendName
from flexsparse.errors import ArgumentError, ShapeError, check_number
from flexsparse.grid import Grid
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.modules.compression import MeanCompression, MLPCompression
from flexsparse.rules import MaskRule
from flexsparse.selectors.nsa import NSA


@dataclass(frozen=True, eq=False)
class CompleteWindow(MaskRule):
    """Window i of keys is seen once its last key, ``i * stride + length - 1``, is in the past."""

    length: int
    stride: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx * self.stride + self.length - 1 <= q_idx


class Branches(NamedTuple):
    """Keys, or values, of each branch ``[B, Hkv, S, D]``, where they have projections of their own."""

    compression: Tensor
    selection: Tensor
    window: Tensor


class NSAAttention(nn.Module):
    """Causal attention of three branches, each times a gate in 0 to 1 of its own for query and head.

    ``heads`` query heads over ``kv_heads`` KV heads, keys of ``dim`` features and values of ``v_dim`` (by
    default as many); ``features``: of the layer's input, from which a linear map and a sigmoid make the
    gates. ``selector``: windows, blocks and budget, by default the paper's. ``window``: the last keys
    that a query sees in the third branch, its own among them. ``phi``: how windows are compressed,
    ``"mlp"`` with learned places, for keys and values apart, or ``"mean"``. ``backend`` as in `attention`.

    The choice of blocks has no gradient; all else is differentiable. Where no window is whole yet,
    the first branch gives 0. Positions are the caller's: rotate ``q`` and ``k`` before.

    >>> import torch
    >>> attend = NSAAttention(4, 2, 16, 32, selector=NSA(length=4, stride=2, block=4, keep=4), window=8)
    >>> q, k, x = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 20, 32)
    >>> attend(q, k, k, x).shape
    torch.Size([1, 4, 20, 16])
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        features: int,
        *,
        v_dim: int | None = None,
        selector: NSA | None = None,
        window: int = 512,
        phi: Literal["mlp", "mean"] = "mlp",
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        for name, value in (
            ("heads", heads), ("kv_heads", kv_heads), ("dim", dim), ("features", features)
        ):  # fmt: skip
            check_number("NSAAttention", name, value, int, 1)
        if heads % kv_heads:
            raise ShapeError(
                f"NSAAttention heads must be a multiple of kv_heads, got {heads} and {kv_heads}"
            )
        if v_dim is not None:
            check_number("NSAAttention", "v_dim", v_dim, int, 1)
        if selector is not None and not isinstance(selector, NSA):
            raise ArgumentError(
                f"NSAAttention selector must be an NSA, got {type(selector).__name__}: its other "
                "branches need the windows of one"
            )
        if phi not in ("mlp", "mean"):
            raise ArgumentError(f"NSAAttention phi must be 'mlp' or 'mean', got {phi!r}")
        self.heads, self.kv_heads = heads, kv_heads
        self.widths = dim, dim if v_dim is None else v_dim, features
        self.selector = NSA() if selector is None else selector
        self.backend: BackendName = backend
        length, stride = self.selector.length, self.selector.stride
        # Rules of the module's own: plans of earlier calls are found by the rule object.
        self._complete = CompleteWindow(length, stride)
        self._causal, self._window = Causal(), SlidingWindow(window)
        self.compress_keys: nn.Module
        self.compress_values: nn.Module
        if phi == "mean":
            self.compress_keys = MeanCompression(length, stride)
            self.compress_values = MeanCompression(length, stride)
        else:
            self.compress_keys = MLPCompression(length, stride, dim)
            self.compress_values = MLPCompression(length, stride, v_dim or dim)
        self.gate = nn.Linear(features, 3 * heads)

    def forward(
        self,
        q: Tensor,
        k: Tensor | Branches,
        v: Tensor | Branches,
        x: Tensor,
        *,
        q_offset: int | Tensor | None = None,
    ) -> Tensor:
        """``q [B, Hq, Q, D]``, ``k``, ``v [B, Hkv, S, D]`` and the layer's input ``x [B, Q, features]``.

        Keys and values are shared by the branches, or `Branches` of them; ``q_offset`` as in
        `attention`. -> ``[B, Hq, Q, Dv]``.
        """
        k, v = (y if isinstance(y, Branches) else Branches(y, y, y) for y in (k, v))
        if q.shape[1] != self.heads or k.selection.shape[1] != self.kv_heads:
            raise ShapeError(
                f"NSAAttention of {self.heads} heads over {self.kv_heads} KV heads got "
                f"q {list(q.shape)} and k {list(k.selection.shape)}"
            )
        if x.shape[:2] != (q.shape[0], q.shape[2]):
            raise ShapeError(
                f"NSAAttention needs x [B, Q, features] beside q {list(q.shape)}, got {list(x.shape)}"
            )
        widths = k.compression.shape[-1], v.compression.shape[-1], x.shape[-1]
        if widths != self.widths:
            raise ShapeError(
                "NSAAttention of dim, v_dim and features {}, {} and {} got k, v and x of {}, {} and {}: "
                "make it for these".format(*self.widths, *widths)
            )
        grid = Grid(q.shape[2], k.selection.shape[2], q_offset=q_offset, batch=q.shape[0])
        keys: Tensor = self.compress_keys(k.compression)
        values: Tensor = self.compress_values(v.compression)
        gates = rearrange(self.gate(x).sigmoid(), "b n (c h) -> c b h n 1", c=3)
        # Compressed keys stand for windows, so the queries' positions are told, not counted.
        told = grid.q_offset
        coarse = lse = None
        if keys.shape[2]:
            coarse, lse = attention(
                q, keys, values, rule=self._complete, q_offset=told, scale=self.selector.scale,
                backend=self.backend, return_lse=True,
            )  # fmt: skip
            lse = lse.detach()
        chosen = self.selector.choose(q, keys, grid, lse)
        selected = attention(
            q, k.selection, v.selection, rule=self._causal, select=chosen, q_offset=told,
            scale=self.selector.scale, backend=self.backend,
        )  # fmt: skip
        near = attention(
            q, k.window, v.window, rule=self._window, q_offset=told, scale=self.selector.scale,
            backend=self.backend,
        )  # fmt: skip
        out: Tensor = gates[1] * selected + gates[2] * near
        return out if coarse is None else out + gates[0] * coarse
