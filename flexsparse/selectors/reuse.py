"""One layer's selection for the layers after it: select in a few layers, reuse in the rest.

Source: Yang et al., "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse
Attention", 2024, 3.2 and Algorithm 1, https://arxiv.org/abs/2410.05076: its selecting layers are the
third and one in the middle, the layers before the first of them attend to everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flexsparse.errors import ArgumentError, SelectionError
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector, check_call
from flexsparse.selectors.caches import Cache


class Reuse:
    """``reuse[layer]`` is the selector of a layer, counted from 0; None before the first of ``layers``.

    ``layers`` select by ``selector``; each layer after one of them takes over its logical candidates,
    those of this step: it is an error to ask before the layer has selected, or for other lengths.

    TidalDecode is a token top-k of the true attention, ``OracleTopK(block=1, q_block=1, keep=512)``, in
    layers such as (2, 13). Forms that share every so many layers (IndexShare) write their layers out.

    >>> from flexsparse.selectors.oracle import OracleTopK
    >>> reuse = Reuse(OracleTopK(keep=8), layers=(2, 13))
    >>> reuse[1] is None, reuse.source(12), reuse.source(13)
    (True, 2, 13)
    """

    def __init__(self, selector: Selector, layers: tuple[int, ...]) -> None:
        if not isinstance(selector, Selector):
            raise ArgumentError(f"Reuse selector must be a Selector, got {type(selector).__name__}")
        right = isinstance(layers, tuple) and layers and all(type(n) is int for n in layers)
        if not right or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ArgumentError(f"Reuse layers must be a tuple of rising ints, got {layers!r}")
        self.selector = selector
        self.layers = layers
        self.selected: dict[int, Selection] = {}
        self._of: dict[int, Selector] = {}

    def source(self, layer: int) -> int | None:
        """The layer whose selection this one uses: the last of ``layers`` up to it."""
        return max((n for n in self.layers if n <= layer), default=None)

    def __getitem__(self, layer: int) -> Selector | None:
        source = self.source(layer)
        if source is None:
            return None
        if layer not in self._of:
            of = self.selector
            form = {"block": of.block, "q_block": of.q_block, "keep": of.keep}
            kind = _Selects if layer == source else _Reuses
            # The same object each time, so that what is prepared for it is found again.
            self._of[layer] = kind(reuse=self, layer=layer, source=source, **form)  # type: ignore[arg-type]
        return self._of[layer]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layer(Selector):
    reuse: Reuse = field(repr=False)
    layer: int
    source: int


class _Selects(_Layer):
    """A layer that selects, and leaves its selection to the others."""

    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        return self.leave(self.reuse.selector.select(q, k, grid, rule))

    def leave(self, selection: Selection) -> Selection:
        self.reuse.selected[self.layer] = selection
        return selection

    def cache(self, k: Tensor, capacity: int | None = None) -> Cache:
        return _Leaving(self, k, capacity)


class _Leaving(Cache):
    """The cache of the selector that selects, which also leaves what it finds."""

    selector: _Selects

    def _start(self, k: Tensor) -> None:
        self.inner = self.selector.reuse.selector.cache(k[:, :, :0], self.capacity)

    def _write(self, k: Tensor, position: Tensor) -> None:
        self.inner.append(k)

    def _select(self, q: Tensor, grid: Grid, rule: MaskMod | None) -> Selection:
        return self.selector.leave(self.inner.select(q, grid, rule))


class _Reuses(_Layer):
    """A layer that takes over what its source has selected; its cache holds no keys."""

    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        found = self.reuse.selected.get(self.source)
        if found is None:
            raise SelectionError(
                f"layer {self.layer} reuses the selection of layer {self.source}, which has selected "
                "nothing yet"
            )
        if (found.q_len, found.kv_len) != (grid.q_len, grid.kv_len):
            raise SelectionError(
                f"layer {self.layer} has {grid.q_len} queries and {grid.kv_len} keys, but layer "
                f"{self.source}, whose selection it reuses, selected for {found.q_len} and "
                f"{found.kv_len}: run that layer first in each step"
            )
        return found

    def cache(self, k: Tensor, capacity: int | None = None) -> Cache:
        return Cache(self, k, capacity)
