"""Pictures of rules, selections and layouts: as text, for a terminal, for a page and for a notebook.

pairs      one sign a pair, exact: what docstrings show
axis       a length cut into tiles and into the cells of a picture
raster     what each cell holds: shares of pairs, exact or sampled
source     what may be shown, and how its pairs are asked
words      title, counts and scale, the same under every picture
palette    the colours
terminal   a raster in characters
plotting   the door to matplotlib
figure     a raster in matplotlib
svg        a raster inside a page
notebook   what a notebook shows of each object
"""

from flexsparse.viz.pairs import picture
from flexsparse.viz.plotting import plot

__all__ = ["picture", "plot"]
