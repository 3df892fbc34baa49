"""Where the queries of a call stand among its keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.trees import register

# Positions are 32-bit in kernels, and rules add and subtract them.
LARGEST = 2**30


@register
@dataclass(frozen=True, eq=False, init=False)
class Grid:
    """``q_len`` queries over ``kv_len`` keys; query ``i`` stands at position ``q_offset + i``.

    A position is a slot among the sequence's keys. ``q_offset`` is an int or an int tensor ``[B]``
    and may be negative; left out, the last query stands at the last key (bottom-right, as in
    FlashAttention).

    >>> Grid(2, 5).positions().tolist()
    [[3, 4]]
    """

    q_len: int
    kv_len: int
    q_offset: int | Tensor
    batch: int

    def __init__(
        self, q_len: int, kv_len: int, *, q_offset: int | Tensor | None = None, batch: int = 1
    ) -> None:
        for name, length in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch)):
            if isinstance(length, bool) or not isinstance(length, int | torch.SymInt):
                raise ArgumentError(f"Grid {name} must be an int, got {length!r}")
            if length < 1:
                raise ShapeError(f"Grid {name} must be at least 1, got {length}")
            if length > LARGEST:
                raise ShapeError(f"Grid {name} must be below 2 ** 30, got {length}")
        offset = kv_len - q_len if q_offset is None else q_offset
        if isinstance(offset, Tensor):
            if offset.dtype not in (torch.int32, torch.int64):
                raise ArgumentError(
                    f"q_offset must be an int or an int tensor [B], got {offset.dtype}"
                )
            if tuple(offset.shape) not in ((), (1,), (batch,)):
                raise ShapeError(
                    f"q_offset must have shape [{batch}] (one position a sequence), "
                    f"got {list(offset.shape)}"
                )
            if offset.device.type == "cpu" and not torch.compiler.is_compiling():
                far = offset.abs().max() if offset.numel() else offset.sum()
                if int(far) > LARGEST:
                    raise ShapeError(
                        f"q_offset must be within 2 ** 30 of the first key, got {offset.tolist()}"
                    )
        elif isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt):
            raise ArgumentError(f"q_offset must be an int or an int tensor [B], got {offset!r}")
        elif abs(offset) > LARGEST:
            raise ShapeError(f"q_offset must be within 2 ** 30 of the first key, got {offset}")
        object.__setattr__(self, "q_len", q_len)
        object.__setattr__(self, "kv_len", kv_len)
        object.__setattr__(self, "q_offset", offset)
        object.__setattr__(self, "batch", batch)

    @property
    def per_batch(self) -> bool:
        """Whether each sequence has a position of its own."""
        return isinstance(self.q_offset, Tensor) and self.q_offset.numel() > 1

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """``[B or 1, q_len]`` int64: the position of each query."""
        rows = torch.arange(self.q_len, device=device)
        if isinstance(self.q_offset, Tensor):
            return self.q_offset.to(device=rows.device, dtype=torch.int64).reshape(-1, 1) + rows
        return rows[None] + self.q_offset

    def shape(self, q_block: int, kv_block: int) -> tuple[int, int]:
        """How many query blocks and key blocks cover the grid."""
        return math.ceil(self.q_len / q_block), math.ceil(self.kv_len / kv_block)

    def __repr__(self) -> str:
        offset = "per sequence" if isinstance(self.q_offset, Tensor) else self.q_offset
        return f"Grid({self.q_len}, {self.kv_len}, q_offset={offset}, batch={self.batch})"
