"""Retrieval: the keys of highest inner product, from a vector index on the CPU.

Source: Liu et al., "RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval",
2024, 3, https://arxiv.org/abs/2409.10516. The index is any of the library faiss, one a sequence and
KV head: `pip install flexsparse[retrieval]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, BackendError, check_number
from flexsparse.grid import Grid
from flexsparse.rules import MaskMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector, check_call
from flexsparse.selectors.parts import visible


@dataclass(frozen=True, eq=False, kw_only=True)
class Retrieval(Selector):
    """The ``keep`` keys nearest to each query by ``q . k``, among those that the rule shows it.

    ``index`` is a faiss factory string: "Flat" finds the very best, "HNSW32" or "IVF64,Flat" close ones
    in less time; ``settings`` are faiss's for searching, such as "nprobe=8". What a rule hides is
    searched past: a query asks for four times as many until it has its budget or has seen all that
    the index finds. Tokens alone: ``block`` and ``q_block`` are 1. One list a query head.
    """

    index: str = "Flat"
    settings: str = ""
    keep: int = 128
    block: int = 1
    q_block: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("Retrieval", "keep", self.keep, int, 1)
        if (self.block, self.q_block) != (1, 1):
            raise ArgumentError(
                "Retrieval finds tokens: block and q_block must be 1, got "
                f"{self.block} and {self.q_block}"
            )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        check_call(type(self).__name__, q, k, grid)
        seen = visible(rule, grid, q.shape[1], q.device).cpu()
        seen = seen.expand(q.shape[0], q.shape[1], grid.q_len, grid.kv_len)
        keys, queries = (x.float().cpu() for x in (k, q))
        keep, group = min(self.keep, grid.kv_len), q.shape[1] // k.shape[1]
        chosen = torch.full((*q.shape[:3], keep), -1)
        for b in range(k.shape[0]):
            for g in range(k.shape[1]):
                index = self._built(keys[b, g])
                for h in range(g * group, (g + 1) * group):
                    chosen[b, h] = _searched(index, queries[b, h], seen[b, h], keep)
        return Selection.from_indices(chosen.to(q.device), kv_len=grid.kv_len, q_len=grid.q_len)

    def _built(self, keys: Tensor) -> Any:
        """A faiss index of ``keys [S, D]``."""
        try:
            import faiss
        except ModuleNotFoundError:
            raise BackendError(
                "Retrieval needs the library faiss: pip install 'flexsparse[retrieval]'"
            ) from None
        try:
            made = faiss.index_factory(keys.shape[1], self.index, faiss.METRIC_INNER_PRODUCT)
            made.train(keys.numpy())
            made.add(keys.numpy())
            if self.settings:
                space: Any = faiss.ParameterSpace()
                space.set_index_parameters(made, self.settings)
        except RuntimeError as error:
            said = str(error).strip().splitlines()[-1]
            raise BackendError(
                f"faiss cannot make the index {self.index!r} of {len(keys)} keys"
                f"{f' with {self.settings!r}' if self.settings else ''}: {said}"
            ) from None
        return made


def _searched(index: Any, queries: Tensor, seen: Tensor, keep: int) -> Tensor:
    """``[Q, keep]``: the nearest keys that each query sees, then -1."""
    chosen = torch.full((len(queries), keep), -1)
    open_rows = torch.arange(len(queries))
    wanted = seen.sum(-1).clamp(max=keep)
    asked = keep
    while len(open_rows):
        found = torch.from_numpy(index.search(queries[open_rows].numpy(), asked)[1])
        shown = (found >= 0) & seen[open_rows].gather(1, found.clamp(min=0))
        order = (~shown).to(torch.int8).sort(dim=1, stable=True).indices[:, :keep]
        best = torch.where(shown, found, -1).gather(1, order)
        chosen[open_rows, : best.shape[1]] = best
        done = (shown.sum(1) >= wanted[open_rows]) | (asked >= seen.shape[1])
        open_rows = open_rows[~done]
        asked = min(4 * asked, seen.shape[1])
    return chosen
