"""Multimodal: text is causal, and the tokens of an image see each other in both directions.

Source: Zhou et al., "Transfusion", 2024, 3 (Transfusion attention),
https://arxiv.org/abs/2408.11039.

Known elsewhere as: the image mask of Gemma 3 (``token_type_ids`` of transformers), bidirectional image
spans, multimodal prefix.

>>> import torch
>>> from flexsparse.viz import picture
>>> print(picture(Multimodal(torch.tensor([-1, 0, 0, -1, 1, 1, 1])), 7))
#......
###....
###....
####...
#######
#######
#######
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class Multimodal(MaskRule):
    """Keys at or before the query, and those of the query's own image.

    ``image_of``: int ``[kv_len]`` or ``[B, kv_len]``, the image that each position belongs to, -1
    for text. Queries must stand among the keys.
    """

    image_of: Tensor

    def __post_init__(self) -> None:
        check_table("Multimodal", "image_of", self.image_of, "int", "[kv_len]", "[B, kv_len]")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        ids = self.image_of
        of_q, of_kv = (
            (ids[q_idx], ids[kv_idx]) if ids.ndim == 1 else (ids[b, q_idx], ids[b, kv_idx])
        )
        return (kv_idx <= q_idx) | ((of_q == of_kv) & (of_q >= 0))
