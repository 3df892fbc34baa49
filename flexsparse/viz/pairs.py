"""Rules and selections as text pictures."""

from __future__ import annotations

import torch

from flexsparse.errors import ArgumentError
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod, as_rule, trace_rule
from flexsparse.selection import Selection
from flexsparse.tracing import naming


def picture(
    shown: MaskMod | Selection,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    q_offset: int | None = None,
) -> str:
    """``#`` where query (row) may see key (column) and ``.`` where not, for one batch and head.

    >>> from flexsparse.masks import Causal
    >>> print(picture(Causal(), 3, 5))
    ###..
    ####.
    #####
    """
    if isinstance(shown, Selection):
        for name, given, own in (("q_len", q_len, shown.q_len), ("kv_len", kv_len, shown.kv_len)):
            if given not in (None, own):
                raise ArgumentError(
                    f"a Selection has its own lengths, {shown.q_len} queries and {shown.kv_len} keys, got "
                    f"{name}={given}: leave lengths out"
                )
        allowed = shown.dense()[b % shown.shape[0], h % shown.shape[1]]
        return _drawn(allowed)
    if callable(getattr(shown, "select", None)):
        name = type(shown).__name__
        raise ArgumentError(
            f"picture shows a rule or a Selection, got the selector {name}: call "
            ".select(q, k, grid, rule) first, and show what it gives"
        )
    if hasattr(shown, "block_mask") or hasattr(shown, "layout"):
        raise ArgumentError(
            "picture shows the single pairs of a rule or a Selection; the tiles of a layout are shown by "
            "plot(layout) and print(layout.block_mask)"
        )
    rule = as_rule(shown, "what is shown")
    if rule is None or q_len is None:
        raise ArgumentError("picture needs a rule with a length, picture(rule, 16), or a Selection")
    grid = Grid(q_len, kv_len or q_len, q_offset=q_offset)
    at = torch.tensor
    with naming(trace_rule(rule)):
        pairs = rule(at(b), at(h), grid.positions()[0][:, None], torch.arange(grid.kv_len)[None])
    return _drawn(pairs.expand(grid.q_len, grid.kv_len))


def _drawn(allowed: torch.Tensor) -> str:
    return "\n".join("".join("#" if seen else "." for seen in row) for row in allowed.tolist())
