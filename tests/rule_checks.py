"""What every rule of the gallery is held to: its definition, asked pair by pair."""

from __future__ import annotations

import torch
from oracle import BATCH, HEADS, Pair, defined_pairs, dense, indices, pairs_of, random_tensors

import flexsparse as fs


def allows(rule: fs.MaskRule, pair: Pair, size: int) -> None:
    """Called on indices, traced, and read back from tiles, ``rule`` allows what ``pair`` does."""
    shape = (BATCH, HEADS, size, size)
    called = rule(*indices(size)).expand(shape).tolist()
    bound = rule.bind("cpu")(*indices(size)).expand(shape).tolist()
    grid = fs.Grid(size, size, batch=BATCH)
    layout = fs.build_layout(rule=rule, grid=grid, heads=(HEADS, 2), block_size=(32, 16))
    tiled = layout.dense().expand(shape).tolist()
    for i, j in pairs_of(size):
        for b in range(BATCH):
            for h in range(HEADS):
                wanted = bool(pair(b, h, i, j))
                got = [seen[b][h][i][j] for seen in (called, bound, tiled)]
                assert got == [wanted] * 3, (b, h, i, j)


def attends(rule: fs.MaskRule, pair: Pair, size: int, q_len: int | None = None) -> None:
    """The tiles backend and the reference agree with dense attention under the definition."""
    q_len = size if q_len is None else q_len
    q, k, v = random_tensors(q_len, size, kv_heads=2)
    out, lse = dense(q, k, v, defined_pairs(pair, q_len, size, first=size - q_len))
    got, got_lse = fs.attention(q, k, v, rule=rule, tile=32, backend="tiles", return_lse=True)
    torch.testing.assert_close(got.double(), out, atol=2e-6, rtol=0)
    torch.testing.assert_close(got_lse.double(), lse, atol=2e-6, rtol=0)
    true = fs.reference(q, k, v, rule=rule)
    torch.testing.assert_close(true.out, out, atol=1e-12, rtol=0)
    torch.testing.assert_close(true.lse, lse, atol=1e-12, rtol=0)
