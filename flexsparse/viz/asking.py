"""How the pairs of a picture are asked: each one, some of each unit, or those of the candidates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.viz.axis import Axis

# Up to this many pairs a picture evaluates each one; 8192 x 8192 takes a second.
EXACT_PAIRS = 2**26
PAIRS_AT_ONCE = 2**21
# Past that, so many positions a side are drawn in each unit or candidate, and its ends.
DRAWN = 4
# Candidates evaluated at most, counted with the positions drawn in each.
CANDIDATE_PAIRS = 2**23


class Counts(NamedTuple):
    """By unit ``[rows, columns]``: pairs seen, and whether all, and some, of those asked are."""

    seen: Tensor
    every: Tensor
    some: Tensor
    exact: bool


def counted(mask: MaskMod, select: Selection | None, q: Axis, kv: Axis) -> Counts:
    """What ``mask`` and a selection ``[1, 1, R, K]`` allow, asked as finely as can be afforded."""
    few = q.length * kv.length <= EXACT_PAIRS and kv.length <= PAIRS_AT_ONCE
    if few and q.whole and kv.whole:
        return _every_pair(mask, select, q, kv)
    if select is not None:
        return _candidates(mask, select, q, kv)
    return _drawn(mask, q, kv)


def _every_pair(mask: MaskMod, select: Selection | None, q: Axis, kv: Axis) -> Counts:
    exists = q.size[:, None] * kv.size
    seen = torch.zeros((len(q.size), kv.length), dtype=torch.int64)
    keys = torch.arange(kv.length)
    step = max(1, PAIRS_AT_ONCE // kv.length)
    for start in range(0, q.length, step):
        queries = torch.arange(start, min(start + step, q.length))
        allowed = _asked(mask, queries[:, None], keys)
        if select is not None:
            allowed = allowed & select.dense(queries)[0, 0]
        seen.index_add_(0, queries // q.unit, allowed.to(torch.int64))
    by_unit = torch.zeros(exists.shape, dtype=torch.int64)
    by_unit.index_add_(1, keys // kv.unit, seen)
    return Counts(by_unit.double(), by_unit == exists, by_unit > 0, True)


def _drawn(mask: MaskMod, q: Axis, kv: Axis) -> Counts:
    """Pairs drawn anew in each unit tell its share; its four corners, what a tile's border is."""
    draw = torch.Generator().manual_seed(0)
    exists = q.size[:, None] * kv.size
    seen = torch.zeros(exists.shape, dtype=torch.float64)
    every, some = torch.ones_like(exists, dtype=torch.bool), exists < 0
    step = max(1, PAIRS_AT_ONCE // (len(kv.index) * DRAWN**2))
    for rows in torch.arange(len(q.index)).split(step):
        for corners in (False, True):
            at_q = _positions(q, rows[:, None], (len(rows), len(kv.index)), corners, draw)
            at_kv = _positions(kv, slice(None), (len(rows), len(kv.index)), corners, draw)
            allowed = _asked(mask, at_q.mT, at_kv)
            if not corners:
                seen[rows] = allowed.double().mean((2, 3)) * exists[rows]
            every[rows] &= allowed.flatten(2).all(2)
            some[rows] |= allowed.flatten(2).any(2)
    # A corner may be seen where no pair that was drawn is.
    seen = torch.where(every, exists.double(), torch.maximum(seen, some.double()))
    return Counts(seen, every, some, False)


def _positions(
    axis: Axis,
    units: Tensor | slice,
    shape: tuple[int, int],
    corners: bool,
    draw: torch.Generator,
) -> Tensor:
    """``[rows, columns, m, n]`` positions in units of an axis: the ends, or one in each of n strata,
    m times, so that neither stripes nor a lattice are met in step."""
    first, size = axis.index[units] * axis.unit, axis.size[units]
    if corners:
        within = torch.stack([torch.zeros_like(size), size - 1], -1)[..., None, :]
    else:
        strata = torch.arange(DRAWN) + torch.rand((*shape, DRAWN, DRAWN), generator=draw)
        within = (strata / DRAWN * size[..., None, None]).to(torch.int64)
    return (first[..., None, None] + within).clamp(0, axis.length - 1)


def _candidates(mask: MaskMod, select: Selection, q: Axis, kv: Axis) -> Counts:
    """Asks within the candidates alone: each of their pairs where they are small, some where not."""
    draw = torch.Generator().manual_seed(0)
    shape = (len(q.index), len(kv.index))
    # One more, to which pairs of units that are not looked at go.
    seen = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.float64)
    some, hidden = (torch.zeros(len(seen), dtype=torch.bool) for _ in range(2))
    n_q, n_kv = min(select.q_block, DRAWN), min(select.kv_block, DRAWN)
    width = select.shape[-1] * n_q * n_kv
    rows, share = torch.arange(select.rows), 1.0
    if (affordable := max(1, CANDIDATE_PAIRS // width)) < select.rows:
        rows = torch.randperm(select.rows, generator=draw)[:affordable].sort().values
        share = len(rows) / select.rows
    # Where all pairs of a candidate are asked, its corners are among them.
    passes = (False,) if max(select.q_block, select.kv_block) <= DRAWN else (False, True)
    for chunk in rows.split(max(1, PAIRS_AT_ONCE // (8 * width))):
        chosen = select.indices[0, 0, chunk].cpu().to(torch.int64)  # [r, K]
        row, slot = (chosen >= 0).nonzero(as_tuple=True)
        blocks = (
            (chunk[row] * select.q_block, select.q_block, q),
            (chosen[row, slot] * select.kv_block, select.kv_block, kv),
        )
        for corners in passes:
            places, weight = [], torch.full((len(row),), 1.0 / share, dtype=torch.float64)
            for first, block, axis in blocks:
                size = (axis.length - first).clamp(max=block)
                within = _within(size, min(block, DRAWN), corners, draw)
                places.append(first[:, None] + within)
                weight = weight * size / within.shape[1]
            at_q, at_kv = places[0][:, :, None], places[1][:, None]
            allowed = _asked(mask, at_q, at_kv)
            unit_q, unit_kv = q.slot[at_q // q.unit], kv.slot[at_kv // kv.unit]
            looked = (unit_q >= 0) & (unit_kv >= 0)
            to = torch.where(looked, unit_q * shape[1] + unit_kv, len(seen) - 1).flatten()
            told = allowed.expand(len(row), at_q.shape[1], at_kv.shape[2]).flatten()
            if not corners:
                seen.index_add_(0, to, told * weight.repeat_interleave(len(to) // max(1, len(row))))
            some[to[told]] = True
            hidden[to[~told]] = True
    seen, some, hidden = (x[:-1].view(shape) for x in (seen, some, hidden))
    exists = q.size[:, None] * kv.size
    # Counted from a part of the rows, a whole unit comes out near its area, not at it.
    filled = seen >= exists * (1 - 1e-9 if share == 1 else 0.9)
    seen = torch.minimum(seen, exists.double())
    exact = share == 1 and select.q_block == select.kv_block == 1 and q.whole and kv.whole
    return Counts(seen, filled & ~hidden, some, exact)


def _within(size: Tensor, count: int, corners: bool, draw: torch.Generator) -> Tensor:
    if corners:
        return torch.stack([torch.zeros_like(size), size - 1], 1)
    strata = torch.arange(count) + torch.rand((len(size), count), generator=draw)
    return (strata / count * size[:, None]).to(torch.int64).clamp(max=size[:, None] - 1)


def _asked(mask: MaskMod, at_q: Tensor, at_kv: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    shape = torch.broadcast_shapes(at_q.shape, at_kv.shape)
    return mask(zero, zero, at_q, at_kv).expand(shape)
