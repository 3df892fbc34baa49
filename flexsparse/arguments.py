"""The keywords that every door shares: what each may be, and a sentence for what it may not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, BackendError, ShapeError
from flexsparse.grid import Grid
from flexsparse.selection import Selection
from flexsparse.shapes import axes, settled_number

Empty = Literal["zero", "error"]
Fallback = Literal["self"] | tuple[Literal["local"], int] | None

# Of finite floats.
_LARGEST = sys.float_info.max
# Below it there is no tensor-core product: a kernel of smaller tiles does not exist.
SMALLEST_TILE = 16


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One batch, one head dim, one dtype, one device; Hq a multiple of Hkv."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor) and x.is_nested:
            raise ShapeError(
                f"{name} is a nested tensor: lay sequences end to end, with a rule that keeps them apart "
                "such as Document, or pad them"
            )
    axes(q=(q, "b h q d"), k=(k, "b g s d"), v=(v, "b g s e"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.layout != torch.strided:
            raise ShapeError(f"{name} is sparse ({x.layout}): pass {name}.to_dense()")
        if x.shape[3] < 1:
            raise ShapeError(f"the last axis of {name} must be at least 1, got {list(x.shape)}")
    if q.device.type == "meta":
        raise ShapeError("q is on meta, where there is nothing to compute: move it to a device")
    check_heads((q.shape[1], k.shape[1]))
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ShapeError(f"q is on {q.device} but {name} on {x.device}: move one of them")
        if x.dtype != q.dtype:
            raise ShapeError(
                f"q is {q.dtype} but {name} {x.dtype}: cast one of them, or use torch.autocast"
            )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ShapeError(f"q, k and v must be fp16, bf16, fp32 or fp64, got {q.dtype}")


def check_device(device: torch.device | str) -> torch.device:
    """A device that is there."""
    found = torch.device(device)
    there = found.type != "cuda" or torch.cuda.is_initialized() or torch.cuda.is_available()
    if not there:
        raise ArgumentError(
            f"device {str(found)!r} is not there: torch finds no CUDA here (torch.cuda.is_available()); "
            "give another device"
        )
    return found


def check_heads(heads: Sequence[int]) -> tuple[int, int]:
    if (
        not isinstance(heads, tuple | list)
        or len(heads) != 2
        or not all(isinstance(h, int) and h >= 1 for h in heads)
    ):
        raise ArgumentError(f"heads must be (query heads, KV heads), got {heads!r}")
    q_heads, kv_heads = heads
    if q_heads % kv_heads:
        raise ShapeError(
            f"{q_heads} query heads do not divide into groups over {kv_heads} KV heads: Hq must be a "
            "multiple of Hkv"
        )
    return q_heads, kv_heads


def check_selection(select: object, grid: Grid, heads: tuple[int, int]) -> Selection:
    """A Selection that fits the call's lengths, batch and heads."""
    if isinstance(select, Tensor):
        raise ArgumentError(
            f"select must be a Selection or a Selector, got a tensor {list(select.shape)}: wrap it "
            "with Selection.from_indices or an adapter"
        )
    if isinstance(select, type):
        raise ArgumentError(
            f"select must be a Selection or a Selector, got the class {select.__name__}: make one, "
            f"such as {select.__name__}(...)"
        )
    if not isinstance(select, Selection):
        given = type(select).__name__
        if hasattr(select, "select"):
            raise ArgumentError(
                f"select must be a Selection here, got the selector {given}, which needs q and k: use "
                "attention or make_plan"
            )
        raise ArgumentError(f"select must be a Selection or a Selector, got {given}")
    for name in ("q_len", "kv_len"):
        if getattr(select, name) != getattr(grid, name):
            swapped = select.heads == grid.q_len and select.q_len in (1, *heads)
            hint = (
                ": adapters.nsa takes [B, T, H_kv, K], adapters.msa [B, H_kv, S_q, K]"
                if swapped
                else ""
            )
            if name == "kv_len" and select.kv_len < grid.kv_len and select.q_len == grid.q_len:
                # As where a cache's keys so far stand beside buffers of some capacity.
                hint = (
                    f": over buffers of {grid.kv_len} slots a selector, or its cache, selects with "
                    f"fs.Grid({grid.q_len}, {grid.kv_len}, q_offset=...), where the queries stand"
                )
            raise ShapeError(
                f"select has {name} {getattr(select, name)} but the call has "
                f"{getattr(grid, name)}{hint}"
            )
    if select.batch not in (1, grid.batch):
        raise ShapeError(
            f"select has batch {select.batch} but the call has {grid.batch}: it must be 1 "
            "or the same (a grid made by hand takes Grid(q_len, kv_len, batch=...))"
        )
    if select.heads not in (1, *heads):
        raise ShapeError(
            f"select has {select.heads} heads, but must have 1 (shared), {heads[1]} (per KV head) or "
            f"{heads[0]} (per query head)"
        )
    if torch.compiler.is_compiling():
        # What is decided from blocks, and said of them, is of numbers that do not vary.
        blocks = settled_number(select.q_block), settled_number(select.kv_block)
        return Selection._whole(select.indices, select.q_len, select.kv_len, *blocks)
    return select


def tile_size(tile: int | tuple[int, int], name: str = "tile") -> tuple[int, int]:
    """``n`` or ``(query, key)``, each at least 16."""
    pair = (tile, tile) if isinstance(tile, int) else tile
    if (
        not isinstance(pair, tuple | list)
        or len(pair) != 2
        or not all(isinstance(t, int) and not isinstance(t, bool) for t in pair)
    ):
        raise ArgumentError(f"{name} must be a size or (query size, key size), got {tile!r}")
    if min(pair) < SMALLEST_TILE:
        raise BackendError(
            f"{name} must be at least {SMALLEST_TILE}, got {tile!r}: tensor cores multiply 16 rows at "
            "a time, so no kernel has smaller tiles; finer candidates stay exact inside a larger tile"
        )
    return settled_number(pair[0]), settled_number(pair[1])


def check_split(split: int | bool | None) -> int | bool | None:
    """None, False, or the tiles from which on rows and columns are cut."""
    if split is None or split is False:
        return split
    if type(split) is int and split >= 1:
        return settled_number(split)
    raise ArgumentError(
        f"split must be None (as predicted), False (never) or the number of tiles beyond which rows and "
        f"columns of tiles are cut, got {split!r}"
    )


def check_cluster(cluster: bool | None) -> bool | None:
    """None, or whether rows are laid beside those that select alike."""
    if cluster is None or isinstance(cluster, bool):
        return cluster
    raise ArgumentError(f"cluster must be None (as predicted), True or False, got {cluster!r}")


def check_fallback(fallback: Fallback) -> int | None:
    """How many keys before and with its own an empty query gets; None without fallback."""
    if fallback is None:
        return None
    if fallback == "self":
        return 1
    if isinstance(fallback, tuple) and len(fallback) == 2:
        kind, count = fallback
        if kind == "local" and type(count) is int and count >= 1:
            return settled_number(count)
    raise ArgumentError(
        f"fallback must be None, 'self' or ('local', n) with n >= 1, got {fallback!r}"
    )


def check_empty(empty: str) -> Empty:
    if empty not in ("zero", "error"):
        raise ArgumentError(f"empty must be 'zero' or 'error', got {empty!r}")
    return "zero" if empty == "zero" else "error"


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")
    return value


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        usual: float = head_dim**-0.5
        return usual
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ArgumentError(
            f"scale must be a number, got {type(scale).__name__}: a learned scale is a score, "
            "ScoreRule.of(lambda s, b, h, q, kv: s * scale)"
        )
    if not torch.compiler.is_compiling() and not -_LARGEST <= scale <= _LARGEST:
        raise ArgumentError(f"scale must be finite, got {scale}")
    return float(scale)


def check_sink(sink: Tensor | None, heads: int, device: torch.device) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        given = sink.dtype if isinstance(sink, Tensor) else type(sink).__name__
        raise ArgumentError(
            f"sink must be a float tensor [Hq], one logit a query head, got {given}"
        )
    if tuple(sink.shape) != (heads,):
        raise ShapeError(
            f"sink must have shape [{heads}], one logit a query head, got {list(sink.shape)}"
        )
    if sink.device != device:
        raise ShapeError(f"sink is on {sink.device} but q on {device}: move it")
    return sink
