"""Oracle top-p: the fewest blocks that really hold a share of the attention, by computing all of it.

Source: the oracle of Lin et al., "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p
Pruning", 2025, 4.1, https://arxiv.org/abs/2502.02770, over blocks and rows of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexsparse.selectors.budgets import Mass
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.physical import Keep


@dataclass(frozen=True, eq=False, kw_only=True)
class OracleTopP(OracleTopK):
    """`OracleTopK` with a share of the mass for a budget instead of a count."""

    keep: Keep = field(default=Mass(0.9))
