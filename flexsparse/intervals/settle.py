"""Tiles that intervals leave open, settled by their pairs: a few at first, all where those agree.

A pair that is seen and one that is hidden make a tile partial, whatever its other pairs are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.coverage import Span, cover
from flexsparse.kernels.parts import PAIRS_AT_ONCE
from flexsparse.rules import MaskMod

# Keys in a row that are asked first, from the middle of a tile: patterns repeat within few.
_RUN = 16


def settle(mask: MaskMod, tiles: Tensor, may_fail: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """bool ``[n]`` twice: which of ``tiles [n, 4]`` are partial, and which are full.

    Tiles that ``may_fail`` are asked at every pair, as an error at any of them must show.
    """
    partial = torch.zeros(len(tiles), dtype=torch.bool, device=tiles.device)
    full = partial.clone()
    for places in (_scattered(span, tiles.device), _rim(span, tiles.device)):
        left = (~partial & ~may_fail).nonzero()[:, 0]
        partial[left] = _is_mixed(mask, tiles[left], places, span)
    left = (~partial).nonzero()[:, 0]
    covered = cover(mask, tiles[left], span)
    partial[left] = (covered.visible > 0) & ~covered.full
    full[left] = (covered.visible > 0) & covered.full
    return partial, full


def _is_mixed(mask: MaskMod, tiles: Tensor, places: Tensor, span: Span) -> Tensor:
    """Whether some pair at ``places [2, p]`` of a tile is seen and another hidden.

    Places count from the first pair of a tile; those past its last stand for the last.
    """
    at_once = max(1, PAIRS_AT_ONCE[tiles.device.type] // places.shape[1])
    mixed = [torch.zeros(0, dtype=torch.bool, device=tiles.device)]
    for chunk in tiles.split(at_once):
        b, h, row, column = chunk[:, :, None].unbind(1)
        q = (row * span.q_tile + places[0]).clamp(max=span.q_len - 1)
        kv = (column * span.kv_tile + places[1]).clamp(max=span.kv_len - 1)
        seen = mask(b, h, q, kv).expand(len(chunk), places.shape[1])
        mixed.append(seen.any(1) & ~seen.all(1))
    return torch.cat(mixed)


def _scattered(span: Span, device: torch.device) -> Tensor:
    """``[2, p]``: corners, a lattice in between, and a run of keys in the middle row."""
    last = torch.tensor([[span.q_tile - 1], [span.kv_tile - 1]], device=device)
    corners = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]], device=device) * last
    steps = torch.arange(1, 12, device=device)
    lattice = torch.stack([steps, steps * 7 % 12]) * last // 12
    run = torch.arange(_RUN, device=device) + span.kv_tile // 2
    row = torch.full_like(run, span.q_tile // 2)
    return torch.cat([corners, lattice, torch.stack([row, run.clamp(max=span.kv_tile - 1)])], 1)


def _rim(span: Span, device: torch.device) -> Tensor:
    """``[2, p]``: the first, middle and last row and column."""
    q = torch.arange(span.q_tile, device=device)
    kv = torch.arange(span.kv_tile, device=device)
    lines = [torch.stack([torch.full_like(kv, at), kv]) for at in _thirds(span.q_tile)]
    lines += [torch.stack([q, torch.full_like(q, at)]) for at in _thirds(span.kv_tile)]
    return torch.cat(lines, 1)


def _thirds(size: int) -> tuple[int, int, int]:
    return 0, size // 2, size - 1
