"""Rows of a selection laid beside those that select alike, so that a tile of them visits fewer tiles.

An order is found anew for every selection, on the device. Results never depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.address import Identity
from flexsparse.kernels.rows import EMPTY, FULL
from flexsparse.selection import Selection
from flexsparse.shapes import ceil_div

# Of the hashes of a row's candidates the least are compared: two rows have the same least one as often
# as a part of what either selects is selected by both.
_PRIME = 1048573
_HASHES = ((715827, 91), (402653, 7919), (913, 524287))


class Order(NamedTuple):
    """int32 ``[B or 1, H or 1, rows]`` in kernel coordinates: the row that is laid at each place, and the
    place at which each row is laid."""

    place: Tensor
    inverse: Tensor


def alike(select: Selection) -> Tensor:
    """int64 ``[B, H, R]``: the rows of a selection, those with alike candidates beside each other.

    Source: Broder, "On the resemblance and containment of documents", 1997: min-wise hashing.
    """
    chosen = select.indices.to(torch.int64)
    sign = torch.zeros(chosen.shape[:3], dtype=torch.int64, device=chosen.device)
    for factor, shift in _HASHES:
        hashed = torch.where(chosen >= 0, (chosen * factor + shift) % _PRIME, _PRIME)
        sign = sign * 2**20 + hashed.amin(-1)
    if select.q_len % select.q_block:
        # The row that is short stays the last.
        sign = torch.cat([sign[..., :-1], torch.full_like(sign[..., -1:], 2**62)], -1)
    return torch.argsort(sign, dim=-1, stable=True)


def in_order(select: Selection, rows: Tensor) -> Selection:
    """The selection with its rows so ordered."""
    at = rows[..., None].expand(select.shape)
    indices = select.indices.gather(2, at).contiguous()
    return Selection._whole(indices, select.q_len, select.kv_len, select.q_block, select.kv_block)


def order_of(select: Selection, rows: Tensor, address: Identity, batch: int) -> Order:
    """The order of kernel rows in which rows of the selection stand so."""
    device = rows.device
    query = rows[..., None] * select.q_block + torch.arange(select.q_block, device=device)
    query = query.flatten(2)[..., : select.q_len]
    beside = address.rows_per_query
    row = (query[..., None] * beside + torch.arange(beside, device=device)).flatten(2)
    place = address.lists(row, batch).contiguous()
    number = torch.arange(place.shape[-1], device=device).expand_as(place)
    inverse = torch.empty_like(place).scatter_(-1, place, number)
    return Order(place.to(torch.int32), inverse.to(torch.int32))


def codes_in_order(codes: Tensor, rows: Tensor, each: int) -> Tensor:
    """What a rule makes of tiles of ``each`` rows of a selection, laid in order, from what it makes of
    tiles of one: codes ``[B or 1, H or 1, R, C]`` and rows ``[B or 1, H or 1, R]``."""
    batch, heads = (max(a, b) for a, b in zip(codes.shape[:2], rows.shape[:2], strict=True))
    codes, rows = (
        x.repeat_interleave(heads // x.shape[1], 1).expand(batch, *[-1] * (x.ndim - 1))
        for x in (codes, rows)
    )
    laid = codes.gather(2, rows[..., None].expand(-1, -1, -1, codes.shape[-1]))
    missing = ceil_div(laid.shape[2], each) * each - laid.shape[2]
    low, high = (
        torch.nn.functional.pad(laid, (0, 0, 0, missing), value=value).unflatten(2, (-1, each))
        for value in (FULL, EMPTY)
    )
    low, high = low.amin(3), high.amax(3)
    return torch.where(low == high, low, 1).to(codes.dtype)
