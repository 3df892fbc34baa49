"""Few queries over long lists: every list is shared out among splits, and what they found is joined.

A lane is one list of tiles and the query heads that walk it: those of a KV head where they share
their list, else each alone. The splits of a lane take equal runs of its walk, partial tiles first,
and leave a Partial each; the joining goes through them in order, so the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from flexsparse.shapes import ceil_div

# Programs for each multiprocessor: enough for uneven lists to even out, few enough to join quickly.
_PROGRAMS_EACH = 4
# What the CPU's walk divides for, so that it too has parts to join.
_CPU_PROCESSORS = 4


class Lanes(NamedTuple):
    """``heads`` lanes an entry of the batch, each of ``group`` query heads; ``sharing`` of them read
    the same KV head."""

    batch: int
    heads: int
    group: int
    sharing: int

    @property
    def number(self) -> int:
        return self.batch * self.heads


def lanes_of(q: Tensor, k: Tensor, counts: Tensor) -> Lanes:
    """The lanes of ``q [B, H, Q, D]`` over ``k [B, G, S, D]`` with lists ``[B or 1, 1 | G | H, 1]``."""
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    if counts.shape[1] in (1, kv_heads):
        return Lanes(batch, kv_heads, heads // kv_heads, 1)
    return Lanes(batch, heads, 1, heads // kv_heads)


def splits_for(lanes: int, steps: int, device: torch.device) -> int:
    """Among how many programs a lane of at most ``steps`` is shared out: by shapes alone."""
    processors = _CPU_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _shared_out(lanes, steps, processors)


@lru_cache(maxsize=256)
def _shared_out(lanes: int, steps: int, processors: int) -> int:
    """The splits whose rounds of programs take the fewest steps, each with one to begin, and one more
    where what the splits found has to be joined."""

    def took(splits: int) -> int:
        rounds = ceil_div(lanes * splits, processors)
        return rounds * (ceil_div(steps, splits) + 1) + (splits > 1)

    most = max(1, min(steps, _PROGRAMS_EACH * processors // lanes))
    return min(range(1, most + 1), key=took)


def walk(
    q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], mask: Tensor | None, kv_tile: int,
    capacity: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``[B, H, Q, Dv]`` in q's dtype and lse ``[B, H, Q]`` in fp32.

    ``lists`` are counts ``[B or 1, 1 | G | H, 1]`` and indices ``[…, W]`` of the partial tiles, then
    of the full; ``mask [B or 1, lanes or 1, W, group or 1, Q, kv_tile]`` says what of the partial tiles is
    seen, None that all is. No lane lists more than ``capacity`` tiles.
    """
    run = torch.ops.flexsparse.split_walk if torch.compiler.is_compiling() else walked
    out, lse = run(q, k, v, list(lists), mask, kv_tile, capacity, scale)
    return out, lse


def walked(
    q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], mask: Tensor | None, kv_tile: int,
    capacity: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.is_cuda:
        from flexsparse.backends.triton_decode import launch

        return launch(q, k, v, lists, mask, kv_tile, capacity, scale)
    return in_step(q, k, v, lists, mask, kv_tile, capacity, scale)


_operator = custom_op("flexsparse::split_walk", walked, mutates_args=())


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], mask: Tensor | None, kv_tile: int,
    capacity: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def in_step(
    q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], mask: Tensor | None, kv_tile: int,
    capacity: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of the kernels: all splits of all lanes take their j-th tile together."""
    lanes = lanes_of(q, k, lists[0])
    splits = splits_for(lanes.number, capacity, q.device)
    batch, heads = lanes.batch, lanes.heads
    rows = q.reshape(batch, heads, -1, q.shape[-1]).float()  # [B, lanes, group * Q, D]
    some, all_of = (x.expand(batch, heads, 1) for x in (lists[0], lists[2]))
    total = some + all_of
    share = (total + splits - 1) // splits
    here = q.device
    first = torch.arange(splits, device=here) * share
    last = torch.minimum(first + share, total)
    peak = rows.new_full((batch, heads, splits, rows.shape[2]), -torch.inf)
    mass = torch.zeros_like(peak)
    out = rows.new_zeros((*peak.shape, v.shape[-1]))
    b = torch.arange(batch, device=here).view(-1, 1, 1, 1)
    head = (torch.arange(heads, device=here) // lanes.sharing).view(1, -1, 1, 1)
    for j in range(int(share.max())):
        slot = first + j
        masked = slot < some
        tile = torch.where(masked, _at(lists[1], slot), _at(lists[3], slot - some))
        key = tile[..., None].to(torch.int64) * kv_tile + torch.arange(kv_tile, device=here)
        inside = (slot < last)[..., None] & (key < k.shape[2])
        key = key.clamp(max=k.shape[2] - 1)
        keys, values = (
            x[b, head, key].float().masked_fill(~inside[..., None], 0) for x in (k, v)
        )  # [B, lanes, splits, kv_tile, D]
        scores = rows[:, :, None] @ keys.transpose(-1, -2) * scale
        seen = inside[..., None, :]
        if mask is not None:
            seen = seen & (_asked(mask, slot, lanes, q.shape[2]) | ~masked[..., None, None])
        scores = scores.masked_fill(~seen, -torch.inf)
        new = torch.maximum(peak, scores.amax(-1))
        # Who has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
        base = torch.where(new == -torch.inf, 0, new)
        weight, shrink = (scores - base[..., None]).exp(), (peak - base).exp()
        peak, mass = new, mass * shrink + weight.sum(-1)
        out = out * shrink[..., None] + weight @ values
    joined, lse = _joined(peak, mass, out)
    shape = (batch, q.shape[1], q.shape[2])
    return joined.view(*shape, v.shape[-1]).to(q.dtype), lse.view(shape)


def _at(indices: Tensor, slot: Tensor) -> Tensor:
    """Entries ``[B, lanes, splits]`` of lists ``[B or 1, lanes or 1, 1, W]``; any where there is none."""
    spread = indices[:, :, 0].expand(*slot.shape[:2], -1)
    return spread.gather(-1, slot.clamp(0, indices.shape[-1] - 1).to(torch.int64))


def _asked(mask: Tensor, slot: Tensor, lanes: Lanes, q_len: int) -> Tensor:
    """``[B, lanes, splits, group * Q, kv_tile]``: what the slots' tiles show."""
    spread = mask.expand(lanes.batch, lanes.heads, -1, lanes.group, q_len, -1)
    b = torch.arange(lanes.batch, device=mask.device).view(-1, 1, 1)
    h = torch.arange(lanes.heads, device=mask.device).view(1, -1, 1)
    return spread[b, h, slot.clamp(0, mask.shape[2] - 1).to(torch.int64)].flatten(3, 4)


def _joined(peak: Tensor, mass: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Parts ``[B, lanes, splits, rows]`` into one ``[B, lanes, rows]``."""
    top = peak.amax(2)
    base = torch.where(top == -torch.inf, 0, top)
    weight = (peak - base[:, :, None]).exp()
    total = (weight * mass).sum(2)
    divisor = torch.where(total == 0, 1, total)
    joined = (weight[..., None] * out).sum(2) / divisor[..., None]
    return joined, torch.where(total == 0, -torch.inf, base + divisor.log())


def most_tiles(widths: tuple[int, int], columns: int, *, selected: bool) -> int:
    """The most tiles that a lane can list, its lists being so wide.

    What a selection names has room in either list; of a rule either may be as long.
    """
    return min(columns, widths[0] if selected else sum(widths))


def steps_of(tiles: int, kv_tile: int, keys: int) -> int:
    """How many steps of ``keys`` keys so many tiles are."""
    return ceil_div(tiles * kv_tile, keys)
