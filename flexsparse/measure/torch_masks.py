"""torch's own ways to a BlockMask: from lists, from indices in plain torch, from every pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.device import compiled_alone
from flexsparse.device.clock import free_bytes
from flexsparse.kernels.compress import compress
from flexsparse.kernels.rows import EMPTY, FULL
from flexsparse.layout import widened
from flexsparse.measure.contender import Contender, UnfitError, scattered
from flexsparse.measure.conversion import Conversion
from flexsparse.shapes import ceil_div


def from_kv_blocks(made: Conversion) -> Contender:
    """torch's BlockMask from finished lists by row, called as torch's users do: the lists by column
    are its work, whether they are wanted or not."""
    from torch.nn.attention.flex_attention import BlockMask

    layout = made.layout
    num, idx, full_num, full_idx = widened(layout.lists, layout.span)[:4]
    arguments = _arguments(made) | {"compute_q_blocks": True}
    note = "lists by row given" + ("" if layout.columns else "; makes those by column, unwanted")
    return Contender(
        lambda: BlockMask.from_kv_blocks(num, idx, full_num, full_idx, **arguments), note
    )


def eager_lists(made: Conversion) -> Contender:
    """The same from indices: scattered to a map, reduced to tiles and sorted, in plain torch."""
    from torch.nn.attention.flex_attention import BlockMask

    problem, layout, plan = made.problem, made.layout, made.plan
    indices = problem.indices
    if indices is None or plan is None:
        raise UnfitError("there are no indices: a rule alone is converted")
    codes = plan.ahead.codes
    if codes is not None and codes.shape[1] > 1:
        raise UnfitError("the rule differs from head to head")
    blocks = (problem.q_block, problem.kv_block)
    address, span, batch = layout.address, layout.logical_span, problem.grid.batch
    if any(a % b and b % a for a, b in zip(blocks, span[2:], strict=True)):
        raise UnfitError("blocks and tiles do not nest")
    columns, arguments = ceil_div(problem.grid.kv_len, problem.kv_block), _arguments(made)

    def lists() -> BlockMask:
        chosen = scattered(indices, columns)
        touched, covered = (address.lists(m, batch) for m in _tiles(chosen, blocks, span))
        if codes is not None:
            touched, covered = touched & (codes != EMPTY), covered & (codes == FULL)
        full = touched & covered
        rows = *compress(touched & ~full), *compress(full)
        return BlockMask.from_kv_blocks(*rows, **arguments)

    member = layout.program.asks_member(layout.block_size)
    left_out = "; membership inside tiles left out" if member else ""
    return Contender(lists, f"from indices: scatter, sort, from_kv_blocks{left_out}")


def compiled_create_block_mask(made: Conversion) -> Contender:
    """torch's create_block_mask, compiled, over every pair of the same mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    layout = made.layout
    b, h = layout.kv_num_blocks.shape[:2]
    q_len, kv_len = layout.span[:2]
    needed, free = b * h * q_len * kv_len, free_bytes(made.problem.device)
    if needed > free:
        raise UnfitError(
            f"a byte for each of its pairs is {needed / 2**30:,.0f} GiB, and {free / 2**30:,.0f} are free"
        )
    mask = layout.mask_mod
    compiled = compiled_alone(create_block_mask, dynamic=False)
    sizes = (b, h, q_len, kv_len, str(made.problem.device), layout.block_size)
    given = ", membership given as bits" if layout.select is not None else ""
    return Contender(lambda: compiled(mask, *sizes), f"every pair evaluated{given}")


def _tiles(chosen: Tensor, blocks: tuple[int, int], span: Span) -> tuple[Tensor, Tensor]:
    """``[B, H, R, C]`` of blocks as maps of tiles: any block of a tile, and all of them."""
    some = every = chosen
    sides = zip((-2, -1), blocks, span[2:], span.tiles, strict=True)
    for axis, block, tile, count in sides:
        if block >= tile:
            if block > tile:
                some, every = (
                    m.repeat_interleave(block // tile, axis).narrow(axis, 0, count)
                    for m in (some, every)
                )
            continue
        inside = min(tile // block, chosen.shape[axis])
        missing = count * inside - chosen.shape[axis]
        pad = (0, missing) if axis == -1 else (0, 0, 0, missing)
        some, every = (
            torch.nn.functional.pad(m, pad, value=value) if missing else m
            for m, value in ((some, False), (every, True))
        )
        some = some.unflatten(axis, (count, inside)).any(axis)
        every = every.unflatten(axis, (count, inside)).all(axis)
    return some, every


def _arguments(made: Conversion) -> dict[str, Any]:
    layout = made.layout
    return {
        "BLOCK_SIZE": layout.block_size,
        "mask_mod": layout.mask_mod,
        "seq_lengths": layout.span[:2],
        "compute_q_blocks": layout.columns is not None,
    }
