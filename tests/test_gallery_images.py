"""Rules on images and videos, against their papers' definitions, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import pytest
import torch
from oracle import Pair
from rule_checks import allows, attends

import flexsparse as fs
from flexsparse.masks import Neighborhood, ShiftedWindow, SlidingTile

Canvas = tuple[int, ...]
Case = tuple[fs.MaskRule, Pair]

# The awkward sizes as images and videos, and one beside which text stands.
CANVASES: dict[int, list[Canvas]] = {
    1: [(1,), (1, 1), (1, 1, 1)],
    7: [(7,), (7, 1), (1, 7, 1), (2, 3)],
    63: [(63,), (7, 9), (3, 3, 7)],
    64: [(64,), (8, 8), (4, 4, 4), (5, 12)],
    65: [(65,), (5, 13), (4, 4, 4)],
    200: [(200,), (10, 20), (5, 5, 8)],
}
CASES = [(size, canvas) for size, canvases in CANVASES.items() for canvas in canvases]


def tokens(canvas: Canvas) -> list[Canvas]:
    """The coordinates of a canvas in row-major order."""
    return list(product(*map(range, canvas)))


def pairs(near: dict[Canvas, set[Canvas]], order: list[Canvas]) -> Pair:
    def pair(b: int, h: int, i: int, j: int) -> bool:
        return max(i, j) < len(order) and order[j] in near[order[i]]

    return pair


def around(at: int, length: int, size: int, step: int = 1) -> set[int]:
    """The window of NATTEN on a line: slid inside at its ends, within a residue of ``step``."""
    line = list(range(at % step, length, step))
    first = line.index(at) - size // 2
    while first < 0:
        first += 1
    while first + size > len(line):
        first -= 1
    return set(line[first : first + size])


def neighborhood(canvas: Canvas, kernel: Canvas, dilation: Canvas | None) -> Case:
    steps = dilation or (1,) * len(canvas)
    near = {at: set(product(*map(around, at, canvas, kernel, steps))) for at in tokens(canvas)}
    return Neighborhood(canvas, kernel, dilation), pairs(near, tokens(canvas))


def fitting(canvas: Canvas, *wanted: int) -> Canvas:
    """A length an axis, in turn from ``wanted``, or the whole axis where it is shorter."""
    return tuple(min(n, wanted[i % len(wanted)]) for i, n in enumerate(canvas))


def in_tiles(canvas: Canvas, tile: Canvas) -> Iterator[Canvas]:
    """The tokens of a canvas, tile after tile."""
    for corner in product(*(range(0, n, t) for n, t in zip(canvas, tile, strict=True))):
        for inside in product(*map(range, tile)):
            yield tuple(c + i for c, i in zip(corner, inside, strict=True))


def sliding_tile(canvas: Canvas, tile: Canvas, window: Canvas) -> Case:
    """A query tile sees the tiles at most half a window from its centre, which stays inside."""

    def near(at: int, key: int, length: int, size: int, across: int) -> bool:
        half = across // 2
        centre = min(max(at // size, half), length // size - 1 - half)
        return abs(centre - key // size) <= half

    seen = {
        at: {key for key in tokens(canvas) if all(map(near, at, key, canvas, tile, window))}
        for at in tokens(canvas)
    }
    return SlidingTile(canvas, tile, window), pairs(seen, list(in_tiles(canvas, tile)))


def dividing(canvas: Canvas, most: int) -> Canvas:
    return tuple(max(t for t in range(1, most + 1) if n % t == 0) for n in canvas)


def odd(canvas: Canvas, tile: Canvas, most: int) -> Canvas:
    across = (min(n // t, most) for n, t in zip(canvas, tile, strict=True))
    return tuple(n - (n % 2 == 0) for n in across)


def swin(canvas: Canvas, window: Canvas, shift: Canvas | None) -> Case:
    """As Swin computes it: pad, roll by the shift, cut windows, mask what the roll brought together."""
    shifts = shift or (0,) * len(canvas)
    padded = tuple(-(-n // w) * w for n, w in zip(canvas, window, strict=True))
    rolled = torch.arange(prod(padded)).view(padded)
    rolled = rolled.roll([-s for s in shifts], list(range(len(canvas))))
    region = torch.zeros(padded, dtype=torch.int64)
    slices = [
        [slice(0, -w), slice(-w, -s or None), slice(-s, None) if s else slice(0, 0)]
        for w, s in zip(window, shifts, strict=True)
    ]
    for number, part in enumerate(product(*slices)):
        region[part] = number
    groups: dict[tuple[int, ...], set[Canvas]] = {}
    home: dict[Canvas, tuple[int, ...]] = {}
    everywhere = tokens(padded)
    for place in everywhere:
        token = everywhere[int(rolled[place])]
        if any(x >= n for x, n in zip(token, canvas, strict=True)):
            continue
        home[token] = (*(x // w for x, w in zip(place, window, strict=True)), int(region[place]))
        groups.setdefault(home[token], set()).add(token)
    near = {token: groups[home[token]] for token in home}
    return ShiftedWindow(canvas, window, shift), pairs(near, tokens(canvas))


MAKES: dict[str, Callable[[Canvas], Case]] = {
    "neighborhood": lambda c: neighborhood(c, fitting(c, 3, 5), None),
    "neighborhood-even": lambda c: neighborhood(c, fitting(c, 4, 2, 1), None),
    "neighborhood-whole": lambda c: neighborhood(c, c, None),
    "neighborhood-dilated": lambda c: neighborhood(
        c, fitting(tuple(-(-n // 3) for n in c), 3, 2), tuple(min(n, 2) for n in c)
    ),
    "sliding-tile": lambda c: sliding_tile(c, dividing(c, 4), odd(c, dividing(c, 4), 3)),
    "sliding-tile-of-1": lambda c: sliding_tile(c, (1,) * len(c), odd(c, (1,) * len(c), 5)),
    "windows": lambda c: swin(c, fitting(c, 4, 3), None),
    "windows-shifted": lambda c: swin(c, (4,) * len(c), (2,) * len(c)),
    "windows-unequal": lambda c: swin(c, (3, 5, 2)[: len(c)], (1, 0, 1)[: len(c)]),
}


@pytest.mark.parametrize(("size", "canvas"), CASES)
@pytest.mark.parametrize("name", MAKES)
def test_a_rule_is_its_definition_pair_by_pair(name: str, size: int, canvas: Canvas) -> None:
    """On lines, images and videos; positions past the canvas stay apart."""
    allows(*MAKES[name](canvas), size)


@pytest.mark.parametrize(
    ("size", "canvas", "q_len"), [(7, (2, 3), 7), (65, (4, 4, 4), 65), (63, (7, 9), 10)]
)
@pytest.mark.parametrize("name", MAKES)
def test_attention_under_a_rule_is_dense_attention_under_its_definition(
    name: str, size: int, canvas: Canvas, q_len: int
) -> None:
    attends(*MAKES[name](canvas), size, q_len)


@pytest.mark.parametrize(
    ("canvas", "kernel", "dilation"),
    [((9, 11), (3, 5), None), ((9, 11), (3, 2), (3, 5)), ((5, 6, 7), (2, 3, 3), (2, 1, 2))],
)
def test_every_query_of_a_neighborhood_sees_exactly_its_kernel(
    canvas: Canvas, kernel: Canvas, dilation: Canvas | None
) -> None:
    n = prod(canvas)
    rule = Neighborhood(canvas, kernel, dilation)
    zero, at = torch.tensor(0), torch.arange(n)
    counts = rule(zero, zero, at[:, None], at[None]).sum(-1)
    assert counts.tolist() == [prod(kernel)] * n


@pytest.mark.parametrize(("canvas", "tile"), [((4, 6), (2, 3)), ((2, 4, 6), (1, 2, 3))])
def test_the_order_of_tiles_sorts_a_row_major_canvas(canvas: Canvas, tile: Canvas) -> None:
    row_major = tokens(canvas)
    order = SlidingTile(canvas, tile, (1,) * len(canvas)).order().tolist()
    assert [row_major[i] for i in order] == list(in_tiles(canvas, tile))


def test_a_query_before_the_first_key_is_on_no_canvas() -> None:
    """Queries may stand before the keys, where a call's offset is negative."""
    q, k, v = (torch.randn(1, 1, n, 8) for n in (3, 6, 6))
    for rule in (
        Neighborhood((2, 3), (1, 3)),
        SlidingTile((2, 3), (1, 1), (1, 3)),
        ShiftedWindow((2, 3), (1, 3), (0, 1)),
    ):
        _, lse = fs.attention(q, k, v, rule=rule, q_offset=-2, return_lse=True)
        assert lse.isinf().tolist() == [[[True, True, False]]]
