"""What the lists of a layout amount to, without a map of the whole grid."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.coverage import Span, cover
from flexsparse.rules import MaskMod


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """``[n, 4]`` (batch, head, row, column): the tiles of lists by row."""
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    b, h, row, _ = at = used.nonzero().unbind(1)
    return torch.stack([b, h, row, indices[at].to(torch.int64)], 1)


def visible_pairs(mask: MaskMod, partial: list[Tensor], full: list[Tensor], span: Span) -> Tensor:
    """How many pairs are allowed: all that exist in full tiles, in partial ones those ``mask`` allows."""
    inside = cover(mask, listed(*partial), span).visible.sum()
    counts, indices = full
    rows, columns = span.tiles
    row = torch.arange(rows, device=counts.device) * span.q_tile
    queries = (span.q_len - row).clamp(max=span.q_tile)
    # Lists rise, so only the last tile of one can stand at the end of the keys.
    last = indices.gather(-1, (counts - 1).clamp(min=0)[..., None].to(torch.int64))[..., 0]
    missing = columns * span.kv_tile - span.kv_len
    keys = counts.to(torch.int64) * span.kv_tile
    keys = keys - ((counts > 0) & (last == columns - 1)) * missing
    return inside + (queries * keys).sum()


def seeing_queries(mask: MaskMod, lists: list[Tensor], span: Span) -> tuple[Tensor, Tensor]:
    """Tiles ``[n, 4]``, and in each which queries ``[n, q_tile]`` see: all who do are marked.

    Only rows without a full tile ask their pairs.
    """
    has_full = lists[2] > 0
    asked = _outside(listed(*lists[0:2]), has_full)
    queries = cover(mask, asked, span).queries.expand(-1, span.q_tile)
    whole = torch.nn.functional.pad(has_full.nonzero(), (0, 1))
    return torch.cat([asked, whole]), _and_all(queries, len(whole))


def seen_keys(mask: MaskMod, lists: list[Tensor], span: Span) -> tuple[Tensor, Tensor]:
    """Tiles ``[n, 4]``, and in each which keys ``[n, kv_tile]`` are seen: all that are are marked.

    Only columns without a full tile ask their pairs.
    """
    has_full = lists[6] > 0
    asked = _outside(listed(*lists[4:6]), has_full)[:, [0, 1, 3, 2]]
    keys = cover(mask, asked, span).keys.expand(-1, span.kv_tile)
    whole = torch.nn.functional.pad(has_full.nonzero(), (0, 1))[:, [0, 1, 3, 2]]
    return torch.cat([asked, whole]), _and_all(keys, len(whole))


def _outside(tiles: Tensor, lists: Tensor) -> Tensor:
    return tiles[~lists[tiles[:, :3].unbind(1)]]


def _and_all(marked: Tensor, more: int) -> Tensor:
    return torch.cat([marked, marked.new_ones((more, marked.shape[1]))])
