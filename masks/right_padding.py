"""Right padding: sequences of several lengths in one batch, padded at the end.

Source: no paper; the ``key_padding_mask`` of torch,
https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html.

Known elsewhere as: ``seq_lens``, ``cache_seqlens`` of FlashAttention, ``attention_mask`` of transformers.

>>> import torch
>>> from flexsparse.viz import picture
>>> print(picture(RightPadding(torch.tensor([2])), 4))
##..
##..
....
....
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class RightPadding(MaskRule):
    """The first ``lengths[b]`` positions of each sequence; padding neither sees nor is seen.

    ``lengths``: int tensor ``[B]``, in positions. A query's position is the call's ``q_offset``: to
    decode one token of each sequence, ``Causal()`` with ``q_offset=lengths - 1`` is this rule too.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        check_table("RightPadding", "lengths", self.lengths, "int", "[B]")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        length = self.lengths[b]
        return (kv_idx < length) & (q_idx < length)
