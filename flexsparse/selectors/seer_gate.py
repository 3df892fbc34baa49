"""SeerAttention gate: a small attention between pooled blocks, distilled from the real one.

Source: Gao et al., "SeerAttention: Learning Intrinsic Sparse Attention in Your LLMs", 2024, 3.1 (the gate)
and 3.2 (its training), https://arxiv.org/abs/2410.13276. The paper pools q and k before their own
rotation; here they are pooled as attention gets them.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from flexsparse.errors import ArgumentError
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Heads, Selector, check_call, check_sharing, per_list, pooled
from flexsparse.selectors.oracle import attention_mass
from flexsparse.selectors.parts import query_parts
from flexsparse.selectors.tile_budget import TileBudget
from flexsparse.selectors.trained import Trained, charged, check_layer, divergence

# Of rotary embeddings: channel pairs turn from once in 2 pi blocks to about once in this many.
_BASE = 10_000.0


class SeerAttentionGate(Trained, Selector):
    """Softmax over blocks of ``linear(mean q) . linear([max k, min k, mean k])``, rotated by block position.

    One linear map to ``gate_dim`` channels a head. ``threshold`` drops the blocks whose weight is not
    above it; at most ``keep`` stay in any case. ``share`` says who shares a list, as the mean of
    their weights: nobody ("query", the paper), the query heads of a KV head ("kv"), or all
    ("shared"). For q ``[B, heads[0], Q, head_dim]`` and k ``[B, heads[1], S, head_dim]``; no gradient
    reaches them.
    """

    heads: tuple[int, int]
    head_dim: int
    gate_dim: int
    threshold: float | None
    share: Heads

    def __init__(
        self,
        *,
        heads: tuple[int, int],
        head_dim: int,
        gate_dim: int = 128,
        threshold: float | None = None,
        share: Heads = "query",
        keep: int = 16,
        block: int = 64,
        q_block: int = 64,
    ) -> None:
        super().__init__(
            block=block, keep=keep, q_block=q_block, heads=heads, head_dim=head_dim,
            gate_dim=gate_dim, threshold=threshold, share=share,
        )  # fmt: skip
        self.__post_init__()
        check_sharing("SeerAttentionGate", share)
        if gate_dim < 2 or gate_dim % 2:
            raise ArgumentError(
                f"SeerAttentionGate gate_dim must be even, as pairs of channels turn, got {gate_dim}"
            )
        self.queries = nn.Parameter(_drawn(heads[0], head_dim, gate_dim))
        self.keys = nn.Parameter(_drawn(heads[1], 3 * head_dim, gate_dim))

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """The gate's logits, ``[B, Hq, R, C]``."""
        check_layer("SeerAttentionGate", self.heads, self.head_dim, q, k)
        q, k = (x.detach().to(self.queries.dtype) for x in (q, k))
        rows = _mean(q, self.q_block)
        low = pooled(k, self.block, torch.inf).amin(3)
        high = pooled(k, self.block, -torch.inf).amax(3)
        columns = torch.cat([high, low, _mean(k, self.block)], -1)
        # Positions are counted in blocks of keys, a row's by its first query.
        at = grid.positions(q.device)[:, :: self.q_block] / self.block
        rows = _rotated(rows @ self.queries, at)
        columns = _rotated(columns @ self.keys, torch.arange(columns.shape[2], device=k.device))
        columns = columns.repeat_interleave(rows.shape[1] // columns.shape[1], 1)
        scale: float = self.queries.shape[-1] ** -0.5
        return rows @ columns.mT * scale

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        weight = self._log_weight(q, k, grid, rule).exp()
        least = -1.0 if self.threshold is None else self.threshold
        reachable = self.within_reach(q, k, grid, rule, weight.shape[1])
        return self.best(weight, reachable & (weight > least), grid)

    def loss(
        self,
        q: Tensor,
        k: Tensor,
        grid: Grid,
        rule: MaskMod | None = None,
        *,
        scale: float | None = None,
        budget: TileBudget | None = None,
    ) -> Tensor:
        """``KL(p || gate)`` a row and head; p the highest attention weight of each block, scaled to 1.

        ``scale`` is attention's, by default ``D ** -0.5``; ``budget`` adds its charge.
        """
        logits = self._masked(q, k, grid, rule)
        target = self._target(q.detach(), k.detach(), grid, rule, scale)
        loss = divergence(target.to(logits.dtype), logits).mean()
        if budget is None:
            return loss
        return loss + charged(self, self._log_weight(q, k, grid, rule), budget)

    def _masked(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None) -> Tensor:
        logits = self.score(q, k, grid)
        return logits.masked_fill(~self.within_reach(q, k, grid, rule, q.shape[1]), -torch.inf)

    def _log_weight(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None) -> Tensor:
        """``[B, H, R, C]``: log of a list's mean weight, -inf where its heads may see nothing."""
        logits = self._masked(q, k, grid, rule)
        none = (logits == -torch.inf).all(-1, keepdim=True)
        log = logits.masked_fill(none, 0.0).log_softmax(-1).masked_fill(none, -torch.inf)
        if self.share == "query":
            return log
        lists = 1 if self.share == "shared" else k.shape[1]
        mean = per_list(log.exp(), k.shape[1], self.share, "sum") * (lists / q.shape[1])
        return mean.clamp(min=torch.finfo(mean.dtype).tiny).log().masked_fill(mean == 0, -torch.inf)

    @torch.no_grad()
    def _target(
        self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None, scale: float | None
    ) -> Tensor:
        """``[B, Hq, R, C]``: the highest weight that a query of the row gives a key of the block."""
        rows = []
        entries = q.shape[0] * q.shape[1] * grid.kv_len
        for part, within in query_parts(grid, self.q_block, entries):
            mass = attention_mass(q[:, :, part], k, within, rule, scale)
            mass = pooled(mass.mT, self.block, 0.0).amax(3).mT
            rows.append(pooled(mass, self.q_block, 0.0).amax(3))
        return torch.cat(rows, 2)


def _drawn(heads: int, wide: int, narrow: int) -> Tensor:
    return torch.randn(heads, wide, narrow) / math.sqrt(wide)


def _mean(x: Tensor, block: int) -> Tensor:
    """The mean of each block, the last over the tokens that it has."""
    block = min(block, x.shape[2])
    total = pooled(x, block, 0.0).sum(3)
    have = x.shape[2] - torch.arange(total.shape[2], device=x.device) * block
    return total / have.clamp(max=block)[:, None]


def _rotated(x: Tensor, at: Tensor) -> Tensor:
    """``x [B, H, N, 2 n]`` with channel c and c + n turned by ``at [B or 1, N] * base ** (-c / n)``."""
    half = x.shape[-1] // 2
    rate = _BASE ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = rearrange(at.to(x.dtype).reshape(-1, x.shape[2]), "b n -> b 1 n 1") * rate
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
