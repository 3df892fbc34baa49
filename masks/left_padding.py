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

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class LeftPadding(MaskRule):
    """All but the first ``padding[b]`` positions of each sequence; padding neither sees nor is seen.

    ``padding``: int tensor ``[B]``, in positions.
    """

    padding: Tensor

    def __post_init__(self) -> None:
        given = self.padding
        if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64):
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise ArgumentError(f"LeftPadding padding must be an int tensor [B], got {kind}")
        if given.ndim != 1:
            raise ArgumentError(f"LeftPadding padding must be [B], got shape {list(given.shape)}")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = self.padding[b]
        return (kv_idx >= first) & (q_idx >= first)
