"""Lightning indexer: a few small heads score every key, one set of keys for all heads.

Source: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, 2.1 (the
index score) and 2.1.1 (dense warm-up and sparse training), https://arxiv.org/abs/2512.02556. The
paper projects the hidden state and rotates the first 64 channels; here the input is what attention
gets, all heads of q and all of k side by side, which carry their rotation already.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexsparse.arguments import tile_size
from flexsparse.errors import ShapeError
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector, check_call, pooled
from flexsparse.selectors.oracle import attention_mass
from flexsparse.selectors.parts import best_in_parts, query_parts, visible
from flexsparse.selectors.tile_budget import TileBudget
from flexsparse.selectors.trained import Trained, charged, check_layer, divergence


class LightningIndexer(Trained, Selector):
    """``I[t, s] = sum_j w[t, j] * relu(q_index[t, j] . k_index[s])``; the ``keep`` best s of each t.

    Of ``index_heads`` (64 in the paper) queries of ``index_dim`` (128) and one key a token. w is
    scaled by ``index_heads ** -0.5 * index_dim ** -0.5``. With ``block`` or ``q_block`` above 1, a
    block takes its best key, a row its best query. For q ``[B, heads[0], Q, head_dim]`` and k ``[B,
    heads[1], S, head_dim]``; no gradient reaches them.
    """

    heads: tuple[int, int]
    head_dim: int
    index_heads: int
    index_dim: int

    def __init__(
        self,
        *,
        heads: tuple[int, int],
        head_dim: int,
        index_heads: int = 64,
        index_dim: int = 128,
        keep: int = 2048,
        block: int = 1,
        q_block: int = 1,
    ) -> None:
        super().__init__(
            block=block, keep=keep, q_block=q_block, heads=heads, head_dim=head_dim,
            index_heads=index_heads, index_dim=index_dim,
        )  # fmt: skip
        self.__post_init__()
        self.queries = nn.Linear(heads[0] * head_dim, index_heads * index_dim, bias=False)
        self.weights = nn.Linear(heads[0] * head_dim, index_heads, bias=False)
        self.keys = nn.Sequential(
            nn.Linear(heads[1] * head_dim, index_dim, bias=False), nn.LayerNorm(index_dim)
        )
        self.scaling = (index_heads * index_dim) ** -0.5

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        check_layer("LightningIndexer", self.heads, self.head_dim, q, k)
        return self._blocks(self._index(q, self._keys(k)))

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        check_layer("LightningIndexer", self.heads, self.head_dim, q, k)
        keys = self._keys(k)

        def score(part: slice, within: Grid) -> Tensor:
            index = self._index(q[:, :, part], keys)
            return self._blocks(index.masked_fill(~self._shown(q, within, rule), -torch.inf))

        return best_in_parts(self, grid, self._entries(k), score)

    def loss(
        self,
        q: Tensor,
        k: Tensor,
        grid: Grid,
        rule: MaskMod | None = None,
        *,
        select: Selection | None = None,
        scale: float | None = None,
        budget: TileBudget | None = None,
    ) -> Tensor:
        """``KL(p || softmax(I))`` a query, p being attention's weights summed over its heads, scaled to 1.

        Over all that the rule shows (dense warm-up, 2.1.1), or with ``select`` over the keys it
        holds (sparse training). ``scale`` is attention's, by default ``D ** -0.5``. ``budget`` adds
        its charge for the rows of tiles of this call.
        """
        check_layer("LightningIndexer", self.heads, self.head_dim, q, k)
        q, k = q.detach(), k.detach()
        step = self.q_block if budget is None else tile_size(budget.tile)[0]
        total = q.new_zeros((), dtype=self._dtype)
        for part, within in query_parts(grid, step, self._entries(k) + q.shape[1] * grid.kv_len):
            seen = None if select is None else _members(select, part)
            given: Any = (q[:, :, part], k, within, rule, seen, scale, budget)
            # Computed again in backward: only one part's scores are ever held.
            made: Tensor = checkpoint(self._part_loss, *given, use_reentrant=False)
            total = total + made * (within.q_len / grid.q_len)
        return total

    def _part_loss(
        self,
        q: Tensor,
        k: Tensor,
        grid: Grid,
        rule: MaskMod | None,
        seen: Tensor | None,
        scale: float | None,
        budget: TileBudget | None,
    ) -> Tensor:
        with torch.no_grad():
            target = attention_mass(q, k, grid, rule, scale).sum(1, keepdim=True)
            shown = self._shown(q, grid, rule)
        index = self._index(q, self._keys(k)).masked_fill(~shown, -torch.inf)
        learned = index if seen is None else index.masked_fill(~seen, -torch.inf)
        loss = divergence(target.to(index.dtype), learned).mean()
        return loss if budget is None else loss + charged(self, self._blocks(index), budget)

    def _shown(self, q: Tensor, grid: Grid, rule: MaskMod | None) -> Tensor:
        """bool ``[B or 1, 1, Q or 1, S or 1]``: keys that some head may see, since all share a list."""
        return visible(rule, grid, q.shape[1], q.device).any(1, keepdim=True)

    def _keys(self, k: Tensor) -> Tensor:
        """``[B, 1, S, index_dim]``."""
        made: Tensor = self.keys(rearrange(k.detach(), "b g s d -> b s (g d)").to(self._dtype))
        return made[:, None]

    def indexed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries ``[B, Q, J, E]``, keys ``[B, S, E]`` and weights ``[B, Q, J]`` before their scale."""
        check_layer("LightningIndexer", self.heads, self.head_dim, q, k)
        queries, weights = self._queries(q)
        return queries, self._keys(k)[:, 0], weights

    def _queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        flat = rearrange(q.detach(), "b h q d -> b q (h d)").to(self._dtype)
        queries = rearrange(self.queries(flat), "b q (j d) -> b q j d", d=self.index_dim)
        return queries, self.weights(flat)

    def _index(self, q: Tensor, keys: Tensor) -> Tensor:
        """The index score ``[B, 1, Q, S]``."""
        queries, weights = self._queries(q)
        products = torch.relu(queries.transpose(1, 2) @ keys.mT)
        return torch.einsum("bjqs,bqj->bqs", products, weights * self.scaling)[:, None]

    def _blocks(self, index: Tensor) -> Tensor:
        """A block's best key, a row's best query."""
        if self.block > 1:
            index = pooled(index.mT, self.block, -torch.inf).amax(3).mT
        return pooled(index, self.q_block, -torch.inf).amax(3) if self.q_block > 1 else index

    @property
    def _dtype(self) -> torch.dtype:
        return self.queries.weight.dtype

    def _entries(self, k: Tensor) -> int:
        """What one query holds: a score a key and index head."""
        return k.shape[0] * k.shape[2] * self.weights.out_features


def _members(select: Selection, part: slice) -> Tensor:
    """bool ``[B, 1, n, S]``: the keys that each query of ``part`` has in its list."""
    if select.heads != 1:
        raise ShapeError(
            f"the indexer's loss takes a selection that all heads share, got {select.heads} lists: "
            "leave select out, or take the indexer's own"
        )
    query = torch.arange(part.start, part.stop, device=select.device)
    lists = select.indices[:, :, query // select.q_block].to(torch.int64)
    marked = torch.zeros((*lists.shape[:3], select.candidates + 1), device=lists.device)
    # What is unused is written past the end, where nobody reads.
    marked.scatter_(3, lists.where(lists >= 0, select.candidates), 1.0)
    keys = torch.arange(select.kv_len, device=lists.device) // select.kv_block
    return marked[..., keys] > 0
