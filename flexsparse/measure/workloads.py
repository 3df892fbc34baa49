"""Rules of a given size, for configurations of the bench."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.masks.document import Document
from flexsparse.rules import MaskRule


def documents(length: int, count: int, seed: int = 0) -> Document:
    """``count`` documents of random lengths that fill ``length`` positions.

    >>> documents(6, 2, seed=1).document_of.tolist()
    [0, 1, 1, 1, 1, 1]
    """
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randperm(length - 1, generator=draw)[: count - 1] + 1
    begins = torch.zeros(length, dtype=torch.int32)
    begins[starts] = 1
    return Document(begins.cumsum(0).to(torch.int32))


def head_windows(heads: int, smallest: int, largest: int) -> MaskRule:
    """A causal window a head, their sizes growing evenly from head to head in powers of two."""
    sizes = torch.logspace(
        torch.tensor(smallest).log2().item(), torch.tensor(largest).log2().item(), heads, base=2
    )
    window = sizes.round().to(torch.int32)

    def windows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < window[h])

    return MaskRule.of(windows)
