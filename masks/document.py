"""Document: packed sequences that do not see each other.

Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021,
https://arxiv.org/abs/2107.02027.

Known elsewhere as: packing, jagged or varlen attention, ``cu_seqlens`` of FlashAttention, segment ids.

>>> import torch
>>> from flexsparse.viz import picture
>>> print(picture(Document(torch.tensor([0, 0, 1, 1, 1, -1])), 6))
##....
##....
..###.
..###.
..###.
......
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class Document(MaskRule):
    """Only the keys of the query's own document.

    ``document_of``: int ``[kv_len]`` or ``[B, kv_len]``, the document of each position. -1 is
    padding, which neither sees nor is seen.
    """

    document_of: Tensor

    def __post_init__(self) -> None:
        check_table("Document", "document_of", self.document_of, "int", "[kv_len]", "[B, kv_len]")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        ids = self.document_of
        of_q, of_kv = (
            (ids[q_idx], ids[kv_idx]) if ids.ndim == 1 else (ids[b, q_idx], ids[b, kv_idx])
        )
        return (of_q == of_kv) & (of_q >= 0)
