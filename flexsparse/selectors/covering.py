"""Sets that hold enough of a total, lists that heads share, and where rows stand among the keys."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.grid import Grid
from flexsparse.intervals import reach
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, pooled


def precise(x: Tensor) -> Tensor:
    """At least fp32: what is ranked is not ranked in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def smallest_cover(mass: Tensor, share: Tensor | float, first: Tensor | None = None) -> Tensor:
    """bool ``[..., n]``: the fewest entries of ``mass [..., n]`` that hold ``share`` of its sum.

    ``first``, bool, are taken before all others, and always. The entry that crosses the share is in
    the set; equal entries go to the lower index.

    >>> smallest_cover(torch.tensor([1.0, 4.0, 2.0, 1.0]), 0.6).int()
    tensor([0, 1, 1, 0], dtype=torch.int32)
    >>> smallest_cover(torch.tensor([1.0, 4.0, 2.0, 1.0]), 0.6, torch.tensor([True] + [False] * 3)).int()
    tensor([1, 1, 0, 0], dtype=torch.int32)
    """
    before, total, order = _descending(mass, first)
    chosen = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, before < share * total)
    return chosen if first is None else chosen | first


def largest_within(mass: Tensor, share: Tensor | float) -> Tensor:
    """bool ``[..., n]``: as `smallest_cover`, but without the entry that crosses the share.

    >>> largest_within(torch.tensor([1.0, 4.0, 2.0, 1.0]), 0.6).int()
    tensor([0, 1, 0, 0], dtype=torch.int32)
    """
    before, total, order = _descending(mass, None)
    after = before + mass.gather(-1, order)
    return torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, after <= share * total)


def _descending(mass: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of all earlier entries, the sum of all, and the order that they are taken in."""
    rank = mass if first is None else mass.masked_fill(first, torch.inf)
    # Whatever comes first is taken whole: its inner order does not matter.
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    running = mass.gather(-1, order).cumsum(-1)
    before = torch.cat([torch.zeros_like(running[..., :1]), running[..., :-1]], -1)
    return before, running[..., -1:], order


def highest(score: Tensor, count: Tensor | int) -> Tensor:
    """bool ``[..., n]``: the ``count`` highest entries of ``score [..., n]``, the lower index first.

    >>> highest(torch.tensor([3.0, 1.0, 3.0, 2.0]), 2).int()
    tensor([1, 0, 1, 0], dtype=torch.int32)
    """
    order = score.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(score.shape[-1], device=score.device)
    return torch.zeros_like(score, dtype=torch.bool).scatter(
        -1, order, (place < count).expand_as(order)
    )


def block_sums(x: Tensor, block: int) -> Tensor:
    """``[..., S]`` -> ``[..., C]``: the sum over each block, the last one as long as it is."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    sums: Tensor = x.unflatten(-1, (-1, block)).sum(-1)
    return sums


def block_means(x: Tensor, block: int) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, C, D]``: the mean over the positions that a block has."""
    there = block_sums(torch.ones(x.shape[2], dtype=x.dtype, device=x.device), block)
    return pooled(x, block, 0.0).sum(3) / there[:, None]


def row_ends(grid: Grid, q_block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[B or 1, R]`` each: the position of a row's first query, and of its last."""
    rows, _ = grid.shape(q_block, 1)
    first = torch.arange(rows, device=device) * q_block
    last = (first + q_block).clamp(max=grid.q_len) - 1
    positions = grid.positions(device)
    return positions[:, first], positions[:, last]


def in_reach(
    q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None, blocks: tuple[int, int]
) -> Tensor:
    """bool ``[B or 1, Hq or 1, R, C]``: blocks ``(q_block, block)`` in which some query may see a key."""
    tile = min(blocks[0], grid.q_len), min(blocks[1], grid.kv_len)
    span = Span(grid.q_len, grid.kv_len, *tile)
    return reach(rule, grid, (q.shape[1], k.shape[1]), span, q.device)


def listed(chosen: Tensor, grid: Grid, q_block: int, block: int) -> Selection:
    """A Selection of the blocks marked in bool ``[B, H, R, C]``."""
    indices = torch.arange(chosen.shape[-1], device=chosen.device)
    return Selection.from_indices(
        torch.where(chosen, indices, -1),
        kv_len=grid.kv_len,
        q_len=grid.q_len,
        kv_block=block,
        q_block=q_block,
        out_of_range="drop",
    )


def shared(selection: Selection, kv_heads: int, heads: Heads) -> Selection:
    """Lists of the query heads, joined for those that share one: what any of them chose."""
    lists = {"shared": 1, "kv": kv_heads, "query": selection.heads}[heads]
    if lists >= selection.heads:
        return selection
    return Selection.from_indices(
        rearrange(selection.indices, "b (g r) m k -> b g m (r k)", g=lists),
        kv_len=selection.kv_len,
        q_len=selection.q_len,
        kv_block=selection.kv_block,
        q_block=selection.q_block,
        out_of_range="drop",
    )


def check_share(owner: str, field: str, value: object) -> None:
    """Refuses what is no share of a total: a number, or float ``[Hq]``, above 0 and at most 1."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim <= 1:
        flat = value.reshape(-1)
        wrong = flat[~((flat > 0) & (flat <= 1))]
        if len(wrong) == 0:
            return
        given = str(float(wrong[0]))
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
        return
    else:
        given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ArgumentError(f"{owner} {field} must be above 0 and at most 1, got {given}")


def per_head(value: Tensor | float, q: Tensor, owner: str, field: str) -> Tensor | float:
    """A number for all heads, or a tensor ``[Hq]`` made to stand beside ``[B, Hq, …, …]``."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if len(value) != q.shape[1]:
        raise ShapeError(
            f"{owner} {field} must have one entry for each of the {q.shape[1]} query heads, got "
            f"{len(value)}"
        )
    return value.to(q.device)[:, None, None]
