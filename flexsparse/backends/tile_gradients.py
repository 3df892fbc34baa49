"""The backward of the tiles backend: rows gather dQ, columns dK and dV, and scores are re-derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.backends.walk import Tiles, Walk, steps


class Backward(NamedTuple):
    walk: Walk
    do: Tensor
    delta: Tensor
    base: Tensor
    score_tables: list[Tensor]
    learned: list[bool]

    def by_rows(self, lists: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        walk = self.walk
        batch, heads, q_len, dim = walk.q.shape
        total = batch * heads * walk.span.tiles[0]
        dq = walk.q.new_zeros((total, walk.span.q_tile, dim))
        sums = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, walk.q.dtype))
            for t in self._owned()
        ]
        area = walk.span.q_tile * walk.span.kv_tile
        for tiles in steps((lists[0], lists[2]), (lists[1], lists[3]), (batch, heads), area):
            _, d_raw, d_learned = self._step(tiles)
            dq[tiles.row] += d_raw @ walk.keys(walk.k, tiles.row, tiles.column) * walk.scale
            for total_grad, part in zip(sums, d_learned, strict=True):
                total_grad += part
        grads = [s.to(t.dtype) for s, t in zip(sums, self._owned(), strict=True)]
        return dq.view(batch, heads, -1, dim)[:, :, :q_len].contiguous(), grads

    def by_columns(self, lists: list[Tensor]) -> tuple[Tensor, Tensor]:
        walk = self.walk
        batch, heads, _, _ = walk.q.shape
        columns, rows = walk.span.tiles[1], walk.span.tiles[0]
        total = batch * heads * columns
        dk = walk.k.new_zeros((total, walk.span.kv_tile, walk.k.shape[-1]))
        dv = walk.v.new_zeros((total, walk.span.kv_tile, walk.v.shape[-1]))
        area = walk.span.q_tile * walk.span.kv_tile
        for step in steps((lists[4], lists[6]), (lists[5], lists[7]), (batch, heads), area):
            # Here the walker is a column, and what it visits is a row tile of its own head.
            at = step.row
            tiles = Tiles(at // columns * rows + step.column, at % columns, step.masked)
            weight, d_raw, _ = self._step(tiles)
            dv[at] += weight.transpose(-1, -2) @ walk.queries(self.do, tiles.row)
            dk[at] += d_raw.transpose(-1, -2) @ walk.queries(walk.q, tiles.row) * walk.scale
        return self._per_kv_head(dk, walk.k), self._per_kv_head(dv, walk.v)

    def _per_kv_head(self, grad: Tensor, like: Tensor) -> Tensor:
        batch, kv_heads, kv_len, dim = like.shape
        grad = grad.view(batch, kv_heads, -1, self.walk.span.tiles[1] * self.walk.span.kv_tile, dim)
        return grad.sum(2)[:, :, :kv_len].contiguous()

    def _step(self, tiles: Tiles) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The softmax weights of a step, and the gradients of its raw scores and learned tensors."""
        walk = self.walk
        raw, at, seen = walk.pairs(tiles)
        changed, differentiate = raw, None
        if walk.score is not None:
            # Only the score rule is differentiated by torch; the rest is written out.
            changed, differentiate, *_ = torch.func.vjp(
                lambda raw, *learned: walk.rescored(raw, at, *self._tables(learned)),
                raw,
                *self._owned(),
            )
        weight = (changed - walk.queries(self.base, tiles.row)[..., None]).exp()
        weight = torch.where(seen, weight, 0)
        d_weight = walk.queries(self.do, tiles.row) @ walk.keys(
            walk.v, tiles.row, tiles.column
        ).transpose(-1, -2)
        d_changed = weight * (d_weight - walk.queries(self.delta, tiles.row)[..., None])
        if differentiate is None:
            return weight, d_changed, []
        d_raw, *d_learned = differentiate(d_changed)
        return weight, d_raw, d_learned

    def _owned(self) -> list[Tensor]:
        return [t for t, own in zip(self.score_tables, self.learned, strict=True) if own]

    def _tables(self, learned: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(learned)
        return [
            next(rest) if own else t for t, own in zip(self.score_tables, self.learned, strict=True)
        ]
