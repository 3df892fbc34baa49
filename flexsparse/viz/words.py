"""What is written under every picture: counts, and how much a cell stands for."""

from __future__ import annotations

from flexsparse.viz.raster import Raster

# The classes of pairs, in the order of a legend.
FULL = "seen, in a full tile"
SEEN = "seen, in a partial tile"
HIDDEN = "computed, not seen"
SKIPPED = "skipped"
CANDIDATE = "candidate"
WASTED = "candidate that the rule hides"


def lengths(raster: Raster) -> str:
    """How many queries and keys.

    >>> from flexsparse.masks import Causal
    >>> from flexsparse.viz.source import source
    >>> raster = source(Causal(), 64).raster(32, 32)
    >>> print(lengths(raster), counts(raster), scale(raster, "cell"), sep="; ")
    64 queries x 64 keys; 2,080 pairs seen (50.8%), 6 full and 4 partial tiles of 16x16, inflation 1.23; a cell is 2 x 2 pairs
    """
    return (
        f"{_many(raster.q.length, 'quer', 'y', 'ies')} x {_many(raster.kv.length, 'key', '', 's')}"
    )


def counts(raster: Raster) -> str:
    """Pairs and tiles of one head; "about" where they are estimates."""
    about = "" if raster.exact else "about "
    share = raster.pairs / (raster.q.length * raster.kv.length)
    pairs = _rounded(raster.pairs, raster.exact)
    full, partial = (_rounded(n, raster.exact) for n in (raster.full_tiles, raster.partial_tiles))
    return (
        f"{about}{pairs} pair{'' if raster.pairs == 1 else 's'} seen ({_percent(share)}), "
        f"{full} full and {partial} partial tiles of {raster.q.tile}x{raster.kv.tile}, "
        f"inflation {_ratio(raster.inflation)}"
    )


def scale(raster: Raster, cell: str) -> str:
    """What one ``cell`` (a pixel, a character) stands for, and whether each pair in it was asked."""
    if raster.q.cell == raster.kv.cell == 1:
        return f"a {cell} is one pair"
    sampled = "" if raster.exact else ", sampled"
    return f"a {cell} is {raster.q.cell:,} x {raster.kv.cell:,} pairs{sampled}"


def _many(count: int, stem: str, one: str, more: str) -> str:
    return f"{count:,} {stem}{one if count == 1 else more}"


def _rounded(count: int, exact: bool) -> str:
    """Three digits of an estimate."""
    digits = len(str(count))
    return f"{count if exact or digits <= 3 else round(count, 3 - digits):,}"


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if 1000 <= ratio < float("inf") else f"{ratio:.3g}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or not share else f"{100 * share:.2g}%"
