"""Prefix-LM: the prefix is seen by all, the rest is causal.

Source: Raffel et al., "T5", 2020, 3.2.1, https://arxiv.org/abs/1910.10683.

Known elsewhere as: non-causal decoder, bidirectional prefix; PaliGemma's mask. Several bidirectional
spans are `Multimodal`.

>>> from flexsparse.viz import picture
>>> print(picture(PrefixLM(3), 5))
###..
###..
###..
####.
#####
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, check_number
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class PrefixLM(MaskRule):
    """Keys before ``prefix``, and keys at or before the query.

    ``prefix``: positions, an int or int ``[B]``. 0 and 1 are causal; the whole length is full.
    """

    prefix: int | Tensor

    def __post_init__(self) -> None:
        p = self.prefix
        if isinstance(p, Tensor) and (p.ndim > 1 or p.dtype not in (torch.int32, torch.int64)):
            raise ArgumentError(
                f"PrefixLM prefix must be an int or an int tensor [B], got {p.dtype}{list(p.shape)}"
            )
        if not isinstance(p, Tensor):
            check_number("PrefixLM", "prefix", p, int, 0)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        prefix = self.prefix
        if isinstance(prefix, Tensor) and prefix.ndim == 1:
            prefix = prefix[b]
        return (kv_idx < prefix) | (kv_idx <= q_idx)
