"""What a picture holds, cell by cell: which share of its pairs may be seen, and by which tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.viz.asking import Counts
from flexsparse.viz.axis import Axis


@dataclass(frozen=True, eq=False)
class Raster:
    """``seen``, ``full`` and ``partial`` ``[rows, columns]``: the shares of a cell's pairs that may be
    seen, that lie in full tiles, and that lie in partial ones. A full tile's pairs are all seen.

    ``pairs`` and the tile counts are of one batch and head, and estimates where not ``exact``.
    """

    q: Axis
    kv: Axis
    seen: Tensor
    full: Tensor
    partial: Tensor
    pairs: int
    full_tiles: int
    partial_tiles: int
    exact: bool

    @property
    def inflation(self) -> float:
        """Pairs of the visited tiles over pairs seen."""
        visited = (self.full_tiles + self.partial_tiles) * self.q.tile * self.kv.tile
        return visited / self.pairs if self.pairs else float("inf") if visited else 1.0


def assembled(counts: Counts, q: Axis, kv: Axis, tiles: tuple[Tensor, Tensor] | None) -> Raster:
    """The raster of counts; ``tiles``, bool ``[R, C]`` twice (partial, full), where a layout says."""
    exists = q.size[:, None] * kv.size
    if tiles is None:
        partial, full = _tile_states(counts, exists, q, kv)
    else:
        rows, columns = (
            (axis.index * axis.unit // axis.tile).clamp(max=axis.tiles - 1) for axis in (q, kv)
        )
        partial, full = (t.cpu()[rows][:, columns] & (exists > 0) for t in tiles)
    seen = torch.where(full, exists.double(), counts.seen) * (partial | full)
    area = _by_cell(exists.double(), q, kv)
    shares = [
        _by_cell(x, q, kv) / area for x in (seen, full * exists.double(), partial * exists.double())
    ]
    # A unit that was not looked at counts as its neighbours in the cell.
    cell_area = _sizes(q)[:, None] * _sizes(kv)
    return Raster(
        q=q, kv=kv, seen=shares[0], full=shares[1], partial=shares[2],
        pairs=round(float((shares[0] * cell_area).sum())),
        full_tiles=_tiles(full, tiles, 1, q, kv),
        partial_tiles=_tiles(partial, tiles, 0, q, kv),
        exact=counts.exact,
    )  # fmt: skip


def _tile_states(counts: Counts, exists: Tensor, q: Axis, kv: Axis) -> tuple[Tensor, Tensor]:
    """bool by unit: whether its tile is partial, and full."""
    there = exists > 0
    some = _joined(counts.some & there, q, kv).any(3).any(1)
    full = ~_joined(there & ~counts.every, q, kv).any(3).any(1) & some
    states = []
    for tiles in (some & ~full, full):
        spread = tiles.repeat_interleave(q.per_tile, 0).repeat_interleave(kv.per_tile, 1)
        states.append(spread[: len(q.index), : len(kv.index)] & there)
    return states[0], states[1]


def _joined(by_unit: Tensor, q: Axis, kv: Axis) -> Tensor:
    """``[tile rows, units, tile columns, units]``."""
    ragged = (0, -by_unit.shape[1] % kv.per_tile, 0, -by_unit.shape[0] % q.per_tile)
    padded = torch.nn.functional.pad(by_unit, ragged)
    rows, columns = padded.shape[0] // q.per_tile, padded.shape[1] // kv.per_tile
    return padded.view(rows, q.per_tile, columns, kv.per_tile)


def _by_cell(by_unit: Tensor, q: Axis, kv: Axis) -> Tensor:
    return by_unit.view(q.cells, q.looked, kv.cells, kv.looked).sum((1, 3))


def _sizes(axis: Axis) -> Tensor:
    """How many positions each cell has."""
    first = torch.arange(axis.cells) * axis.cell
    return (axis.length - first).clamp(max=axis.cell).double()


def _tiles(
    state: Tensor, known: tuple[Tensor, Tensor] | None, which: int, q: Axis, kv: Axis
) -> int:
    if known is not None:
        return int(known[which].sum())
    looked = int(state[:: q.per_tile, :: kv.per_tile].sum())
    of = (q.size[:: q.per_tile] > 0).sum() * (kv.size[:: kv.per_tile] > 0).sum()
    return round(looked * q.tiles * kv.tiles / int(of))
