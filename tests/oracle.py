"""Attention and rules written out plainly, to hold the library against; nothing of it is imported here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

SIZES = [1, 7, 63, 64, 65, 200]
BATCH, HEADS = 3, 4

Pair = Callable[[int, int, int, int], object]
"""Whether query i of batch b, head h may see key j."""


def random_tensors(
    q_len: int, kv_len: int, *, kv_heads: int = HEADS, seed: int = 0
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, HEADS, q_len, 16)] + 2 * [(BATCH, kv_heads, kv_len, 16)]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    change: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores, score rule, mask, softmax in fp64; a query that sees nothing gives 0 and -inf."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if change is not None:
        scores = change(scores)
    scores = scores.masked_fill(~seen, -torch.inf)
    peak = scores.amax(-1, keepdim=True).detach()
    weights = (scores - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights / torch.where(total == 0, 1.0, total) @ v
    return out, (total.log() + peak).squeeze(-1)


def close(got: Tensor, want: Tensor, atol: float = 5e-6) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=1e-5)


def pairs_of(size: int) -> Iterator[tuple[int, int]]:
    """Every pair of a small size; of a large one its border and two thousand drawn pairs."""
    if size < 200:
        yield from ((i, j) for i in range(size) for j in range(size))
        return
    draw = random.Random(0)
    for _ in range(2000):
        yield draw.randrange(size), draw.randrange(size)
    for i in range(size):
        yield from ((i, j) for j in (0, i - 1, i, i + 1, size - 1) if 0 <= j < size)


def indices(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.arange(BATCH).view(-1, 1, 1, 1),
        torch.arange(HEADS).view(1, -1, 1, 1),
        torch.arange(size).view(1, 1, -1, 1),
        torch.arange(size).view(1, 1, 1, -1),
    )


def defined_pairs(pair: Pair, q_len: int, kv_len: int | None = None, first: int = 0) -> Tensor:
    """bool ``[B, H, q_len, kv_len]``, asked pair by pair; query 0 stands at position ``first``."""
    keys = range(q_len if kv_len is None else kv_len)
    queries = range(first, first + q_len)
    return torch.tensor(
        [
            [[[bool(pair(b, h, i, j)) for j in keys] for i in queries] for h in range(HEADS)]
            for b in range(BATCH)
        ]
    )
