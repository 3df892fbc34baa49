"""Twilight: of what another selector chose, only as much as holds a given share of the attention.

Source: Lin et al., "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning", 2025, 4,
https://arxiv.org/abs/2502.02770.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from einops import einsum
from torch import Tensor
from torch.nn.functional import pad

from flexsparse.errors import ArgumentError, check_number
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod, MaskRule, as_rule
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing
from flexsparse.selectors.covering import check_share, precise, shared, smallest_cover
from flexsparse.selectors.quest import Quest

# Scores held at once.
_AT_ONCE = 2**22
# Pages of 16 and 8192 tokens, as published.
_BASE = Quest(block=16, q_block=1, keep=512)


@dataclass(frozen=True, eq=False, kw_only=True)
class Twilight(Selector):
    """The fewest candidates of ``base`` that hold ``mass`` of the weight on all of its candidates.

    ``base`` is any selector with a generous budget. Weights are a softmax over its candidates under
    the rule, with keys rounded to ``bits`` bits, a scale and an offset for each key of each head
    (None: keys as they are). They are pruned in each query head in units of ``block`` keys for rows of
    ``q_block`` queries, which must divide those of ``base``; a unit weighs what its keys hold, summed
    over the row. The defaults, one key and one query, are the paper's, for decoding; the one that
    crosses ``mass`` is kept, equal ones go to the lower index. Heads that share a list (``heads``, by
    default the group, as grouped-query kernels need) get all that any of them kept.

    Takes what is gathered: queries times the candidates of one.
    """

    block: int = 1
    q_block: int = 1
    keep: int = field(init=False, repr=False, default=1)
    base: Selector = _BASE
    mass: float = 0.85
    bits: int | None = 4
    heads: Heads = "kv"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharing("Twilight", self.heads)
        check_share("Twilight", "mass", self.mass)
        if self.bits is not None:
            check_number("Twilight", "bits", self.bits, int, 1)
        if not isinstance(self.base, Selector):
            raise ArgumentError(f"Twilight base must be a selector, got {self.base!r}")
        for name in ("block", "q_block"):
            if getattr(self.base, name) % getattr(self, name):
                raise ArgumentError(
                    f"Twilight {name} must divide that of its base, got {getattr(self, name)} and "
                    f"{getattr(self.base, name)}"
                )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        candidates = self.base.select(q, k, grid, rule).refine(
            q_block=self.q_block, kv_block=self.block
        )
        indices = candidates.indices.expand(q.shape[0], -1, -1, -1)
        # One list for each set of query heads that reads the same keys at the same places.
        lists = q.shape[1] if candidates.heads == q.shape[1] else k.shape[1]
        indices = indices.repeat_interleave(lists // candidates.heads, 1)
        weights = self._weights(q, k, grid, as_rule(rule), indices)
        kept = smallest_cover(weights, self.mass)
        every = indices.repeat_interleave(q.shape[1] // lists, 1)
        pruned = Selection.from_indices(
            torch.where(kept, every, -1),
            kv_len=grid.kv_len,
            q_len=grid.q_len,
            kv_block=self.block,
            q_block=self.q_block,
            out_of_range="drop",
        )
        return shared(pruned, k.shape[1], self.heads)

    def _weights(
        self, q: Tensor, k: Tensor, grid: Grid, rule: MaskRule | None, indices: Tensor
    ) -> Tensor:
        """``[B, Hq, R, K]``: what each candidate of ``indices [B, L, R, K]`` weighs."""
        q, k = precise(q), precise(k)
        k = k if self.bits is None else rounded(k, self.bits)
        (batch, lists, rows, width), device = indices.shape, q.device
        b = torch.arange(batch, device=device)
        h = torch.arange(q.shape[1], device=device).view(lists, -1)
        fill = rows * self.q_block - grid.q_len
        queries = pad(q, (0, 0, 0, fill)).unflatten(2, (rows, self.q_block))
        queries = queries.unflatten(1, h.shape) * self._scale(q)
        positions = pad(grid.positions(device), (0, fill)).unflatten(1, (rows, self.q_block))
        exists = (torch.arange(rows * self.q_block, device=device) < grid.q_len).view(rows, -1)
        step = max(1, _AT_ONCE // (batch * lists * width * self.block * q.shape[3]))
        parts = []
        for start in range(0, rows, step):
            part = slice(start, start + step)
            chosen = indices[:, :, part].long()
            token = chosen[..., None] * self.block + torch.arange(self.block, device=device)
            real = (chosen[..., None] >= 0) & (token < grid.kv_len)
            token = token.clamp(0, grid.kv_len - 1).flatten(3)
            keys = k[
                b[:, None, None, None], (h[:, 0] * k.shape[1] // q.shape[1])[:, None, None], token
            ]
            scores = einsum(queries[:, :, :, part], keys, "b l g r s d, b l r n d -> b l g r s n")
            seen = real.flatten(3)[:, :, None, :, None] & exists[part, :, None]
            if rule is not None:
                seen = seen & rule(
                    b.view(-1, 1, 1, 1, 1, 1),
                    h[:, :, None, None, None],
                    positions[:, None, None, part, :, None],
                    token[:, :, None, :, None],
                )
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
            parts.append(weights.sum(4).unflatten(-1, (width, self.block)).sum(-1).flatten(1, 2))
        return torch.cat(parts, 2)

    def _scale(self, q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5) if self.scale is None else self.scale


def rounded(k: Tensor, bits: int) -> Tensor:
    """``k [..., D]`` at ``2 ** bits`` evenly spaced values from its lowest channel to its highest.

    >>> rounded(torch.tensor([0.0, 0.4, 1.0]), 1)
    tensor([0., 0., 1.])
    """
    low, high = k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    codes = ((k - low) / step).round().nan_to_num(0.0)
    values: Tensor = codes * step + low
    return values
