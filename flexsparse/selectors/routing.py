"""Routing: queries and keys that are nearest to the same centroid attend to each other.

Source: Roy et al., "Efficient Content-Based Sparse Attention with Routing Transformers", 2021, 3.1,
https://arxiv.org/abs/2003.05997. The paper learns its centroids as moving averages; here they are
given, or found by k-means in q and k of the call. Tokens of several clusters see their union in one
softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, ShapeError
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector, check_call, pooled
from flexsparse.selectors.parts import best_in_parts, or_own, visible
from flexsparse.shapes import ceil_div


@dataclass(frozen=True, eq=False, kw_only=True)
class Routing(Selector):
    """Each of ``clusters`` centroids takes its nearest ``1 / clusters`` of the queries and of the keys.

    q and k are centred and scaled to length 1 first. ``centroids [Hkv or 1, clusters, D]`` replaces
    k-means of ``iterations`` rounds from keys spread evenly over the sequence, which sees all of it:
    under a causal rule a choice may depend on later tokens, as the paper's does. A query that is
    near no centroid keeps its own key, which the paper leaves open. One list a query head; beyond ``keep``
    keys for a row of queries, those of more common clusters, then the earlier ones, are kept.
    """

    clusters: int = 8
    centroids: Tensor | None = None
    iterations: int = 10
    keep: int = 512
    block: int = 1
    q_block: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters < 1 or self.iterations < 0:
            raise ArgumentError(
                "Routing clusters must be at least 1 and iterations at least 0, got "
                f"{self.clusters} and {self.iterations}"
            )
        given = self.centroids
        if given is not None and (given.ndim != 3 or given.shape[1] != self.clusters):
            raise ShapeError(
                f"Routing centroids must be [Hkv or 1, {self.clusters}, D], got {list(given.shape)}"
            )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        q, k = normalised(q), normalised(k)
        group = q.shape[1] // k.shape[1]
        if self.centroids is None:
            centre = k_means(q, k, self.clusters, self.iterations)
        else:
            centre = self.centroids.to(k).expand(k.shape[0], -1, -1, -1)
        takes_key = self._nearest(centre, k).repeat_interleave(group, 1)
        takes_query = self._nearest(centre.repeat_interleave(q.shape[1] // centre.shape[1], 1), q)

        def score(part: slice, within: Grid) -> Tensor:
            met = takes_query[..., part].mT @ takes_key
            seen = visible(rule, within, q.shape[1], q.device)
            met = or_own(met * seen, seen, within)
            met = pooled(pooled(met, self.q_block, 0.0).sum(3).mT, self.block, 0.0).sum(3).mT
            return met.masked_fill(met == 0, -torch.inf)

        return best_in_parts(self, grid, 3 * q.shape[0] * q.shape[1] * grid.kv_len, score)

    def _nearest(self, centre: Tensor, x: Tensor) -> Tensor:
        """``[B, H, clusters, N]``: 1 where a centroid takes a token; equal ones by the lower index."""
        near = (centre @ x.mT).sort(dim=-1, descending=True, stable=True).indices
        took = near[..., : ceil_div(x.shape[2], self.clusters)]
        return torch.zeros((*near.shape,), device=x.device).scatter_(-1, took, 1.0)


def normalised(x: Tensor) -> Tensor:
    """Layer norm without scale or shift, to length 1; 0 where all channels are equal."""
    x = x if x.dtype == torch.float64 else x.float()
    x = x - x.mean(-1, keepdim=True)
    length: Tensor = x.norm(dim=-1, keepdim=True)
    return x / length.clamp(min=torch.finfo(x.dtype).tiny)


def k_means(q: Tensor, k: Tensor, clusters: int, iterations: int) -> Tensor:
    """``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]`` of length 1 -> ``[B, Hkv, clusters, D]``, of length 1.

    Spherical k-means over both; a centroid that nobody is nearest to stays where it is.
    """
    start = torch.arange(clusters, device=k.device) * k.shape[2] // clusters
    centre = k[:, :, start]
    tokens = torch.cat([k, q.reshape(k.shape[0], k.shape[1], -1, k.shape[3])], 2)
    for _ in range(iterations):
        nearest = (tokens @ centre.mT).argmax(-1)
        total = torch.zeros_like(centre)
        total.scatter_add_(2, nearest[..., None].expand_as(tokens), tokens)
        length = total.norm(dim=-1, keepdim=True)
        centre = torch.where(
            length > 0, total / length.clamp(min=torch.finfo(k.dtype).tiny), centre
        )
    return centre
