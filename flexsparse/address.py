"""Kernel coordinates and logical ones: forward on tensors, backward on what a kernel asks.

A kernel sees a batch, query heads, KV heads and rows. The address says which logical sequence, head
and query each of them is, so that rules, scores and membership keep speaking of logical things; and
where among them a logical query stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from flexsparse.errors import LayoutError

Axis = Literal["rows", "keys", "order"]


@dataclass(frozen=True)
class Identity:
    """Kernel coordinates are the logical ones."""

    heads: int
    kv_heads: int
    # Made once: a number that torch.compile has come to see vary is no part of a string there.
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self._key())

    def _key(self) -> str:
        return f"identity/{self.heads}/{self.kv_heads}"

    @property
    def group(self) -> int:
        """Query heads a KV head, logically."""
        return self.heads // self.kv_heads

    @property
    def fold(self) -> int:
        """KV heads that are part of the kernel's batch."""
        return 1

    @property
    def rows_per_query(self) -> int:
        """Kernel rows that one query takes: more than one where its heads are rows."""
        return 1

    @property
    def kernel_heads(self) -> tuple[int, int]:
        """Query and KV heads as the kernel sees them."""
        return self.heads, self.kv_heads

    def kernel_batch(self, batch: int) -> int:
        return batch

    def pack(self, x: Tensor, name: str) -> Tensor:
        """q, k or v as the kernel wants it; of k and v always a view."""
        return x

    def unpack(self, x: Tensor, batch: int) -> Tensor:
        """An output ``[B, H, Q, …]`` of the kernel in logical axes."""
        return x

    def laid(
        self, tables: list[Tensor], b: Tensor, h: Tensor, q: Tensor, kv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row and key where a launch holds them -> kernel row, key, and the row as it stands in words of
        membership; takes what it reads off ``tables``."""
        return q, kv, q

    def logical(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        """Kernel indices -> sequence, query head, query, position of the key."""
        return b, h, q, kv

    def kernel(self, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sequence, query head, query -> the kernel's entry of the batch, head and row."""
        return b, h, q

    def lists(self, x: Tensor, batch: int) -> Tensor:
        """Something per logical head ``[B or 1, 1 | Hkv | Hq, …]`` -> per kernel list."""
        if x.shape[1] in (1, self.heads):
            return x
        return x.repeat_interleave(self.heads // x.shape[1], 1)

    def codes(self, codes: Tensor) -> Tensor:
        """What a rule makes of tiles for each query head ``[B or 1, Hq or 1, R, C]`` -> for all heads
        that stand in a kernel row of tiles together: 0 where none sees any, 2 where all see all."""
        return codes

    def __str__(self) -> str:
        return "heads as they are"


@dataclass(frozen=True)
class FoldedHeads(Identity):
    """KV heads in the batch: a list per KV head is then shared by all query heads of its entry."""

    def _key(self) -> str:
        return f"folded/{self.heads}/{self.kv_heads}"

    @property
    def fold(self) -> int:
        return self.kv_heads

    @property
    def kernel_heads(self) -> tuple[int, int]:
        return self.group, 1

    def kernel_batch(self, batch: int) -> int:
        return batch * self.kv_heads

    def pack(self, x: Tensor, name: str) -> Tensor:
        batch, heads, *rest = x.shape
        try:
            return x.view(batch * self.kv_heads, heads // self.kv_heads, *rest)
        except RuntimeError:
            raise LayoutError(
                f"{name} with shape {list(x.shape)} and strides {list(x.stride())} cannot fold its KV "
                "heads into the batch without a copy, as this plan does: make the plan from tensors "
                "with these strides"
            ) from None

    def unpack(self, x: Tensor, batch: int) -> Tensor:
        _, _, *rest = x.shape
        return x.reshape(batch, self.heads, *rest)

    def logical(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        return b // self.kv_heads, b % self.kv_heads * self.group + h, q, kv

    def kernel(self, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return b * self.kv_heads + h // self.group, h % self.group, q

    def lists(self, x: Tensor, batch: int) -> Tensor:
        x = x.expand(batch, *x.shape[1:])
        if x.shape[1] == 1:
            x = x.expand(-1, self.kv_heads, *x.shape[2:])
        # A list per KV head serves its whole group; a list per query head stays its own.
        return x.reshape(batch * self.kv_heads, -1, *x.shape[2:])

    def __str__(self) -> str:
        return "KV heads folded into the batch"


@dataclass(frozen=True)
class PackedHeads(FoldedHeads):
    """KV heads in the batch, and the query heads of each beside their queries: with G of them, row r
    is query ``r // G`` of head ``r % G``. A tile spans G times fewer queries; q and out are copied.

    Source: Yuan et al., "Native Sparse Attention", 2025, https://arxiv.org/abs/2502.11089, 3.4: the
    heads of a group share what their query selects, so they are computed together.
    """

    def _key(self) -> str:
        return f"packed/{self.heads}/{self.kv_heads}"

    @property
    def rows_per_query(self) -> int:
        return self.group

    @property
    def kernel_heads(self) -> tuple[int, int]:
        return 1, 1

    def pack(self, x: Tensor, name: str) -> Tensor:
        if name != "q":
            return super().pack(x, name)
        batch, _, queries, *rest = x.shape
        beside = x.view(batch, self.kv_heads, self.group, queries, *rest).transpose(2, 3)
        return beside.reshape(batch * self.kv_heads, 1, queries * self.group, *rest)

    def unpack(self, x: Tensor, batch: int) -> Tensor:
        beside = x.reshape(batch, self.kv_heads, -1, self.group, *x.shape[3:])
        return beside.transpose(2, 3).flatten(1, 2).contiguous()

    def logical(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        head = b % self.kv_heads * self.group + q % self.group
        return b // self.kv_heads, head, q // self.group, kv

    def kernel(self, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return b * self.kv_heads + h // self.group, h - h, q * self.group + h % self.group

    def codes(self, codes: Tensor) -> Tensor:
        if codes.shape[1] == 1:
            return codes
        grouped = codes.view(-1, self.kv_heads, self.group, *codes.shape[2:])
        low, high = grouped.amin(2), grouped.amax(2)
        # 1 where the heads differ, whatever they differ in.
        return torch.where(low == high, low, 1)

    def __str__(self) -> str:
        return f"KV heads folded into the batch, {self.group} query heads beside each query"


@dataclass(frozen=True)
class Taken(Identity):
    """Kernel rows, or keys, of ``inner`` as a launch takes them: any of them, in any order, as its table
    ``[B or 1, H or 1, n]`` says. An ``order`` takes all rows, and words of membership stand in it too."""

    inner: Identity
    axis: Axis

    def _key(self) -> str:
        return f"{self.axis}/{self.inner.key}"

    @property
    def fold(self) -> int:
        return self.inner.fold

    @property
    def rows_per_query(self) -> int:
        return self.inner.rows_per_query

    @property
    def kernel_heads(self) -> tuple[int, int]:
        return self.inner.kernel_heads

    def kernel_batch(self, batch: int) -> int:
        return self.inner.kernel_batch(batch)

    def pack(self, x: Tensor, name: str) -> Tensor:
        return self.inner.pack(x, name)

    def unpack(self, x: Tensor, batch: int) -> Tensor:
        return self.inner.unpack(x, batch)

    def kernel(self, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.kernel(b, h, q)

    def lists(self, x: Tensor, batch: int) -> Tensor:
        return self.inner.lists(x, batch)

    def codes(self, codes: Tensor) -> Tensor:
        return self.inner.codes(codes)

    def laid(
        self, tables: list[Tensor], b: Tensor, h: Tensor, q: Tensor, kv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        place = tables.pop(0)
        entry = b if place.shape[0] > 1 else b - b
        lane = h if place.shape[1] > 1 else h - h
        if self.axis == "keys":
            return self.inner.laid(tables, b, h, q, place[entry, lane, kv])
        row, key, word = self.inner.laid(tables, b, h, place[entry, lane, q], kv)
        return row, key, q if self.axis == "order" else word

    def logical(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        return self.inner.logical(b, h, q, kv)

    def __str__(self) -> str:
        if self.axis == "order":
            return f"{self.inner}, rows in the order of what they select"
        return f"{self.axis} taken from {self.inner}"


def taken(address: Identity, axis: Axis) -> Taken:
    """``address`` of which a launch takes some rows or keys."""
    return Taken(address.heads, address.kv_heads, address, axis)


def address_of(key: str) -> Identity:
    """The address of a key."""
    first, _, rest = key.partition("/")
    for axis in get_args(Axis):
        if first == axis:
            return taken(address_of(rest), axis)
    name, heads, kv_heads = key.split("/")
    kinds = {"identity": Identity, "folded": FoldedHeads, "packed": PackedHeads}
    return kinds[name](int(heads), int(kv_heads))


def folds_without_copy(x: Tensor) -> bool:
    """Whether the heads of ``[B, H, …]`` merge with its batch as a view."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
