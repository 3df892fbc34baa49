"""Decoding: a kernel for few queries, whose lists of tiles are shared out over the whole device.

A tile of a prefill kernel holds many queries, and one program walks its whole list. With one query a
sequence that leaves most of the device idle; here each list is walked by several programs at once, each
reading its part of the keys once for all query heads that share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.backends import Call, Work
from flexsparse.backends.asked import asked
from flexsparse.backends.split_walk import lanes_of, most_tiles, walk
from flexsparse.layout import Layout
from flexsparse.shapes import ceil_div, next_power_of_two

name = "decode"

# Query rows of one KV head that a program holds in registers.
ROWS = 128
MOST_HEAD_DIM = 256
KV_TILES = (16, 128)
# Keys of a tile where no block of a selection suggests a number.
KEYS = 64
# Bytes of K and V that a program takes in one step: two such steps fit into shared memory.
_STEP_BYTES = 2**17


def refuses(call: Call) -> str | None:
    """Why the decode kernel cannot run this call, or None."""
    if call.grads:
        return "the decode kernel has no backward"
    if call.scored:
        return "the decode kernel takes no score rule (backend='flex' does)"
    if call.dtype == torch.float64:
        return "the decode kernel has no fp64"
    if max(call.head_dim, call.v_head_dim) > MOST_HEAD_DIM:
        return (
            f"the decode kernel takes head dims up to {MOST_HEAD_DIM}, got {call.head_dim} and "
            f"{call.v_head_dim}"
        )
    if call.q_len * call.group > ROWS:
        return (
            f"the decode kernel holds up to {ROWS} query rows of a KV head, got {call.q_len} queries "
            f"in {call.group} heads"
        )
    return None


def tile_for(tile: tuple[int, int], call: Call) -> tuple[int, int]:
    """One row of tiles for all rows, those of a query together; as many keys as fit into a step."""
    least, most = KV_TILES
    key_bytes = (call.head_dim + call.v_head_dim) * call.dtype.itemsize
    while most * key_bytes > _STEP_BYTES:
        most //= 2
    fitting = tile[1] if tile[1] == next_power_of_two(tile[1]) else KEYS
    beside = call.program.address.rows_per_query
    rows = max(16, next_power_of_two(call.q_len * beside))
    return ceil_div(rows, beside) * beside, max(least, min(most, fitting))


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    layout = work.layout
    lists = _lists(work)
    lanes = lanes_of(work.q, work.k, lists[0])
    widths = lists[1].shape[-1], lists[3].shape[-1]
    out, lse = walk(
        work.q.detach(),
        work.k.detach(),
        work.v.detach(),
        lists,
        asked(work, lanes, lists[1]),
        layout.block_size[1],
        most_tiles(widths, layout.span.tiles[1], selected=layout.select is not None),
        work.scale,
    )
    return out, lse if work.lse else None


def _lists(work: Work) -> list[Tensor]:
    """The lists by row, one a KV head where those of its query heads are the same.

    Keys whose heads do not fold into the batch, as those of a cache ``[B, S, Hkv, D]``, come with a
    list repeated for each query head; read by one, they are read once.
    """
    lists = work.layout.lists[:4]
    if not _repeated(work.layout):
        return lists
    heads, kv_heads = work.q.shape[1], work.k.shape[1]
    return [x[:, :: heads // kv_heads] if x.shape[1] == heads else x for x in lists]


def _repeated(layout: Layout) -> bool:
    """Whether lists of the query heads of a KV head can only be the same."""
    program = layout.program
    if program.address.fold > 1 or program.member is None or program.uses_head:
        return False
    return program.member.heads in (1, program.address.kv_heads)


def shares(layout: Layout) -> bool:
    """Whether the query heads of a KV head walk one list together."""
    own = layout.kv_num_blocks.shape[1]
    return own in (1, layout.address.kernel_heads[1]) or _repeated(layout)


def rows_held(rows: int, on_cuda: bool) -> int:
    """Rows that are computed where a list is walked for so many: a kernel's tile has a least height."""
    return max(16, next_power_of_two(rows)) if on_cuda else rows
