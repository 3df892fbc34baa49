"""A rule's tiles by a fused judge: a small grid as a map at once, a large one in few wide steps.

A launch and a look by the host cost more here than arithmetic does: so every tile of a small grid is
judged, and a stretch of a large one is cut into many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.intervals.fused import MAY_FAIL, OPEN, FusedJudge
from flexsparse.intervals.runs import RuleTiles, Runs, ordered
from flexsparse.intervals.settle import settle
from flexsparse.kernels.rows import EMPTY, FULL, PARTIAL
from flexsparse.rules import MaskMod
from flexsparse.shapes import ceil_div

# A map of so many tiles is made whole; it is a byte a tile.
MAPPED = 2**24
_CUT = 32
# Open stretches a row from which its queries are asked in slices, and in how many.
_MANY = 12
_SLICES = (2, 8)


def tile_map(judge: FusedJudge, mask: MaskMod) -> Tensor:
    """int8 ``[B, H, R, C]``: EMPTY, PARTIAL or FULL, of the pairs of ``mask``.

    Reads the device once, and again only where the judge leaves tiles open.
    """
    codes = judge.every()
    return codes if int(codes.amax()) < OPEN else settled_map(judge, mask, codes)


def settled_map(judge: FusedJudge, mask: MaskMod, codes: Tensor) -> Tensor:
    """A map of which the judge left tiles open, with these settled in place."""
    flat = codes.view(-1)
    cells = (flat >= OPEN).nonzero()[:, 0]
    flat[cells] = _settled(judge, mask, cells, flat[cells])[0]
    return codes


def found_tiles(judge: FusedJudge, mask: MaskMod) -> RuleTiles:
    """The tiles of a large grid as runs, coarse to fine. Reads the device a few times."""
    rows, columns = judge.span.tiles
    size = 1
    while size * _CUT < columns:
        size *= _CUT
    wide = ceil_div(columns, size)
    cells = torch.arange(judge.lists[0] * judge.lists[1] * rows * wide, device=judge.device)
    codes = judge(cells, wide, size)
    full = [_runs(cells[codes == FULL], wide, size, columns)]
    while size > 1:
        cells, codes = _sliced(judge, *_undecided(cells, codes), wide, size)
        full.append(_runs(cells[codes == FULL], wide, size, columns))
        cells, _ = _undecided(cells, codes)
        size //= _CUT
        line, stretch = cells // wide, cells % wide * _CUT
        wide = ceil_div(columns, size)
        stretch = stretch[:, None] + torch.arange(_CUT, device=judge.device)
        cells = (line[:, None] * wide + stretch)[stretch < wide]
        codes = judge(cells, wide, size)
        full.append(_runs(cells[codes == FULL], wide, size, columns))
    cells, codes = _undecided(cells, codes)
    codes, asked = _settled(judge, mask, cells, codes)
    full.append(_runs(cells[codes == FULL], wide, size, columns))
    partial = _runs(cells[codes == PARTIAL], wide, size, columns)
    runs = Runs(*(torch.cat(x) for x in zip(*full, strict=True)))
    return RuleTiles(
        ordered(partial, columns), ordered(runs, columns), judge.lists, judge.span, asked
    )


def _undecided(cells: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    at = ((codes != EMPTY) & (codes != FULL)).nonzero()[:, 0]
    return cells[at], codes[at]


def _sliced(
    judge: FusedJudge, cells: Tensor, codes: Tensor, wide: int, size: int
) -> tuple[Tensor, Tensor]:
    """The same cells, those left open asked in slices of their queries where they are many."""
    few = _MANY * judge.lists[0] * judge.lists[1] * judge.span.tiles[0]
    for slices in _SLICES:
        if len(cells) <= few or len(at := (codes == OPEN).nonzero()[:, 0]) <= few:
            break
        codes[at] = judge.in_slices(cells[at], wide, size, slices)
    return cells, codes


def _settled(judge: FusedJudge, mask: MaskMod, cells: Tensor, codes: Tensor) -> tuple[Tensor, int]:
    """Codes of single tiles, what is open of them settled by its pairs, and how much that was."""
    rows, columns = judge.span.tiles
    cells, codes = _sliced(judge, cells, codes, columns, 1)
    at = (codes >= OPEN).nonzero()[:, 0]
    line, entry = cells[at] // columns, cells[at] // columns // rows
    heads = judge.lists[1]
    tiles = torch.stack([entry // heads, entry % heads, line % rows, cells[at] % columns], 1)
    partial, full = settle(mask, tiles, codes[at] == MAY_FAIL, judge.span)
    code = torch.where(partial, PARTIAL, torch.where(full, FULL, EMPTY))
    codes[at] = code.to(torch.int8)
    return codes, len(at)


def _runs(cells: Tensor, wide: int, size: int, columns: int) -> Runs:
    first = cells % wide * size
    return Runs(cells // wide, first, (first + size).clamp(max=columns))
