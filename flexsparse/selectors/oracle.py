"""Oracle top-k: the blocks that really hold the most attention, found by computing all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flexsparse.grid import Grid
from flexsparse.rules import MaskMod, as_rule
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing, per_list, pooled


@dataclass(frozen=True, eq=False, kw_only=True)
class OracleTopK(Selector):
    """Ranks blocks by their attention mass under the rule: the bar for every other selector.

    The mass of a block is summed over its keys, the row's queries and the heads that share the
    list. Needs the whole attention matrix, Q times S for each head. ``scale`` is the attention's, by
    default ``D ** -0.5``.
    """

    scores_are_mass: ClassVar[bool] = True

    heads: Heads = "kv"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing(type(self).__name__, self.heads)

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        mass = attention_mass(q, k, grid, rule, self.scale)
        mass = pooled(mass.mT, self.block, 0.0).sum(3).mT
        mass = pooled(mass, self.q_block, 0.0).sum(3)
        return self.chosen(q, k, per_list(mass, k.shape[1], self.heads, "sum"), grid, rule)


def attention_mass(
    q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None, scale: float | None
) -> Tensor:
    """``[B, Hq, Q, S]``: the softmax weights under the rule; 0 for a query that sees nothing."""
    q, k = q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    ruled = as_rule(rule)
    if ruled is not None:
        b = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1)
        h = torch.arange(q.shape[1], device=q.device).view(1, -1, 1, 1)
        position = grid.positions(q.device)[:, None, :, None]
        seen = ruled(b, h, position, torch.arange(grid.kv_len, device=q.device))
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)
