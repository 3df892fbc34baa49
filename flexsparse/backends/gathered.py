"""Attention over lists of keys in plain torch: the specification of the gather kernels, and the path of
the CPU, of fp64 and of score rules. A few queries at a time, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsparse.backends.candidates import Candidates
from flexsparse.program import ScoreProgram

# What a chunk of gathered keys, values and scores may take beside the tensors of the call.
BYTES_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}


class Step(NamedTuple):
    """Some queries and a slice of their lists: ``keys [B, L, n, w]``, what is seen, the keys' KV heads."""

    first: int
    last: int
    at: Tensor
    seen: Tensor
    b: Tensor
    g: Tensor


class Gathered(NamedTuple):
    """A call in logical axes; L lists a sequence serve M query heads each.

    Scores are computed in ``dtype``; a key that is in no list is never part of anything.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    candidates: Candidates
    score: ScoreProgram | None
    score_tables: Sequence[Tensor]
    scale: float
    dtype: torch.dtype

    def forward(self) -> tuple[Tensor, Tensor]:
        """out ``[B, Hq, Q, Dv]`` in q's dtype, lse ``[B, Hq, Q]``."""
        batch, heads, q_len, _ = self.q.shape
        out = self.q.new_empty((batch, heads, q_len, self.v.shape[-1]))
        lse = self.q.new_empty((batch, heads, q_len), dtype=self.dtype)
        for first, last, slices in self._chunks():
            shape = (batch, self.candidates.lists, last - first, self._group)
            peak = self.q.new_full(shape, -torch.inf, dtype=self.dtype)
            mass = torch.zeros_like(peak)
            sums = peak.new_zeros((*shape, self.v.shape[-1]))
            for step in slices:
                scores = self._masked(
                    self._rescored(self._raw(step), step, self.score_tables), step
                )
                new = torch.maximum(peak, scores.amax(-1))
                # A query that has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
                base = torch.where(new == -torch.inf, 0, new)
                weight, shrink = (scores - base[..., None]).exp(), (peak - base).exp()
                mass = mass * shrink + weight.sum(-1)
                sums = sums * shrink[..., None] + weight @ self._read(self.v, step)
                peak = new
            whole = torch.where(mass == 0, 1, mass)
            self._into(out, first, last, sums / whole[..., None])
            self._into(lse, first, last, torch.where(mass == 0, -torch.inf, peak + whole.log()))
        return out, lse

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, learned: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """dq, dk, dv, and the gradients of the score's learned tensors, each in its tensor's dtype."""
        owned = [t for t, own in zip(self.score_tables, learned, strict=True) if own]
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        dk, dv = (
            x.new_zeros((x[..., 0].numel(), x.shape[-1]), dtype=self.dtype)
            for x in (self.k, self.v)
        )
        d_learned = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, self.dtype)) for t in owned
        ]
        for first, last, slices in self._chunks():
            do = self._of(grad_out, first, last)
            # d loss / d score = weight * (dP - delta), with the gradient through lse inside delta.
            delta = (do * self._of(out, first, last)).sum(-1) - self._of(grad_lse, first, last)
            base = self._of(lse, first, last)
            base = torch.where(base == -torch.inf, 0, base)
            dq_chunk = torch.zeros_like(self._of(self.q, first, last))
            for step in slices:
                changed, differentiate = self._differentiable(step, owned, learned)
                weight = (self._masked(changed, step) - base[..., None]).exp()
                d_weight = do @ self._read(self.v, step).mT
                d_raw = weight * (d_weight - delta[..., None])
                if differentiate is not None:
                    d_raw, *parts = differentiate(d_raw)
                    for total, part in zip(d_learned, parts, strict=True):
                        total += part
                    d_raw = torch.where(step.seen[..., None, :], d_raw, 0)
                d_raw = d_raw * self.scale
                dq_chunk += d_raw @ self._read(self.k, step)
                self._add(dk, step, d_raw.mT @ self._of(self.q, first, last))
                self._add(dv, step, weight.mT @ do)
            self._into(dq, first, last, dq_chunk)
        grads = [total.to(t.dtype) for total, t in zip(d_learned, owned, strict=True)]
        return (
            dq,
            dk.view(self.k.shape).to(self.k.dtype),
            dv.view(self.v.shape).to(self.v.dtype),
            grads,
        )

    @property
    def _group(self) -> int:
        return self.q.shape[1] // self.candidates.lists

    def _chunks(self) -> Iterator[tuple[int, int, Iterator[Step]]]:
        """Ranges of queries, each with the slices of its lists."""
        batch, _, q_len, _ = self.q.shape
        lists, width = self.candidates.lists, self.candidates.width
        numbers = 2 * (self.k.shape[-1] + self.v.shape[-1]) + 8 * self._group + 8
        cost = batch * lists * numbers * self.dtype.itemsize
        affordable = max(1, BYTES_AT_ONCE.get(self.q.device.type, 2**25) // cost)
        slots = min(width, affordable)
        for first in range(0, q_len, affordable // slots):
            last = min(first + affordable // slots, q_len)
            yield first, last, self._slices(first, last, slots)

    def _slices(self, first: int, last: int, slots: int) -> Iterator[Step]:
        batch, lists, kv_heads = self.q.shape[0], self.candidates.lists, self.k.shape[1]
        keys = self.candidates.visible(first, last)
        if keys.shape[1] not in (1, lists):
            keys = keys.repeat_interleave(lists // keys.shape[1], 1)
        b = torch.arange(batch, device=keys.device).view(-1, 1, 1, 1)
        g = torch.arange(lists, device=keys.device).view(1, -1, 1, 1) // (lists // kv_heads)
        for part in keys.expand(batch, lists, -1, -1).split(slots, -1):
            yield Step(first, last, part.clamp(min=0).to(torch.int64), part >= 0, b, g)

    def _of(self, x: Tensor, first: int, last: int) -> Tensor:
        """Queries of ``x [B, Hq, Q, …]`` as ``[B, L, n, M, …]``, in the precision of the computation."""
        part = x[:, :, first:last].to(self.dtype)
        shape = (x.shape[0], self.candidates.lists, self._group, *part.shape[2:])
        return part.reshape(shape).transpose(2, 3)

    def _into(self, x: Tensor, first: int, last: int, part: Tensor) -> None:
        x[:, :, first:last] = part.transpose(2, 3).flatten(1, 2).to(x.dtype)

    def _read(self, x: Tensor, step: Step) -> Tensor:
        """``[B, L, n, w, D]``: the listed keys or values; 0 where a slot is unused."""
        gathered = x[step.b, step.g, step.at].to(self.dtype)
        return gathered.masked_fill_(~step.seen[..., None], 0)

    def _add(self, total: Tensor, step: Step, part: Tensor) -> None:
        """Adds ``part [B, L, n, w, D]`` to the keys that it belongs to."""
        key = (step.b * self.k.shape[1] + step.g) * self.k.shape[2] + step.at
        used = part.masked_fill(~step.seen[..., None], 0)
        total.index_add_(0, key.flatten(), used.flatten(0, -2))

    def _raw(self, step: Step) -> Tensor:
        queries = self._of(self.q, step.first, step.last)
        return queries @ self._read(self.k, step).mT * self.scale

    def _masked(self, scores: Tensor, step: Step) -> Tensor:
        return scores.masked_fill(~step.seen[..., None, :], -torch.inf)

    def _rescored(self, raw: Tensor, step: Step, tables: Sequence[Tensor]) -> Tensor:
        """Scores ``[B, L, n, M, w]`` after the score rule."""
        if self.score is None:
            return raw
        heads = torch.arange(self.q.shape[1], device=raw.device)
        h = heads.view(1, self.candidates.lists, 1, self._group, 1)
        row = torch.arange(step.first, step.last, device=raw.device).view(1, 1, -1, 1, 1)
        changed = self.score.mod(tables)(raw, step.b[..., None], h, row, step.at[..., None, :])
        # A score that ignores the old one need not vary with the pair.
        return changed.to(raw.dtype).broadcast_to(raw.shape)

    def _differentiable(
        self, step: Step, owned: Sequence[Tensor], learned: Sequence[bool]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]] | None]:
        """Scores, and what takes their gradients to those of the raw ones and the learned tensors."""
        raw = self._raw(step)
        if self.score is None:
            return raw, None

        def rescored(raw: Tensor, *values: Tensor) -> Tensor:
            rest = iter(values)
            tables = [
                next(rest) if own else t for t, own in zip(self.score_tables, learned, strict=True)
            ]
            return self._rescored(raw, step, tables)

        # Only the score rule is differentiated by torch; the rest is written out.
        changed, differentiate, *_ = torch.func.vjp(rescored, raw, *owned)
        return changed, differentiate
