"""attention-gym's lightning indexer, as a selector: its fused kernels, with the weights of one's own.

Source: `attn_gym.sparse.lightning_indexer` of attention-gym, https://github.com/meta-pytorch/attention-gym;
the score is that of `LightningIndexer`. To be installed apart: ``pip install attn-gym``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, BackendError
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod, as_rule
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector, check_call
from flexsparse.selectors.lightning_indexer import LightningIndexer


@dataclass(frozen=True, eq=False, kw_only=True)
class GymIndexer(Selector):
    """The tokens that ``indexer`` would keep, found by attention-gym.

    ``impl``: ``"fused"``, kernels for Hopper and later in 16 bits, or ``"reference"``, on any device. It
    knows whole sequences alone: as many queries as keys, each at its own key's place, under `Causal` or no
    rule; anything else is refused. Equal scores go to any of them, where flexsparse takes the lower index.
    """

    indexer: LightningIndexer
    impl: Literal["fused", "reference"] = "fused"
    block: int = field(init=False, repr=False, default=1)
    q_block: int = field(init=False, repr=False, default=1)
    keep: int = field(init=False, repr=False, default=1)

    def __post_init__(self) -> None:
        if not isinstance(self.indexer, LightningIndexer):
            given = type(self.indexer).__name__
            raise ArgumentError(f"GymIndexer indexer must be a LightningIndexer, got {given}")
        if self.impl not in ("fused", "reference"):
            raise ArgumentError(
                f"GymIndexer impl must be 'fused' or 'reference', got {self.impl!r}"
            )
        own = self.indexer
        if (own.block, own.q_block) != (1, 1) or type(own.keep) is not int:
            raise ArgumentError(
                "GymIndexer keeps a count of tokens for each query: its indexer must have block=1, "
                f"q_block=1 and an int keep, got {own.block}, {own.q_block} and {own.keep!r}"
            )
        object.__setattr__(self, "keep", own.keep)
        super().__post_init__()

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        causal = _causal(rule)
        stands = isinstance(grid.q_offset, int) and grid.q_offset == 0
        if grid.q_len != grid.kv_len or not stands:
            raise ArgumentError(
                f"attention-gym's indexer takes as many queries as keys, from the first on, got {grid}: "
                "use LightningIndexer"
            )
        try:
            from attn_gym.sparse import lightning_indexer
        except ImportError as error:
            raise BackendError(
                "GymIndexer needs attention-gym: pip install attn-gym, or use LightningIndexer"
            ) from error
        queries, keys, weights = self.indexer.indexed(q, k)
        keep = min(self.keep, grid.kv_len)
        found = lightning_indexer(queries, keys, weights, keep, causal=causal, impl=self.impl)
        return Selection.from_indices(
            found[:, None], kv_len=grid.kv_len, q_len=grid.q_len, out_of_range="drop"
        )


def _causal(rule: MaskMod | None) -> bool:
    from flexsparse.masks.causal import Causal

    judged = as_rule(rule)
    if judged is not None and not isinstance(judged, Causal):
        raise ArgumentError(
            f"attention-gym's indexer knows Causal() or no rule, got {judged!r}: use LightningIndexer"
        )
    return judged is not None
