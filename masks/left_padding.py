r"""Left padding: sequences of several lengths in one batch, padded at the start, as for generation.

Source: no paper; the convention of batched generation, as in
https://huggingface.co/docs/transformers/llm_tutorial.

Known elsewhere as: ``padding_side="left"``, ``attention_mask`` of transformers.

>>> import torch
>>> from flexsparse.viz import picture
>>> print("two of padding:", picture(LeftPadding(torch.tensor([2])), 4), sep="\n")
two of padding:
....
....
..##
..##
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class LeftPadding(MaskRule):
    """All but the first ``padding[b]`` positions of each sequence; padding neither sees nor is seen.

    ``padding``: int tensor ``[B]``, in positions.
    """

    padding: Tensor

    def __post_init__(self) -> None:
        check_table("LeftPadding", "padding", self.padding, "int", "[B]")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = self.padding[b]
        return (kv_idx >= first) & (q_idx >= first)
