"""Global tokens: chosen positions that see everything and that everything sees.

Source: Beltagy et al., "Longformer", 2020, 3.1 (global attention),
https://arxiv.org/abs/2004.05150.

Known elsewhere as: global attention, ETC's global tokens. Longformer's mask is
``Dilated(w // 2 + 1, 1, ahead=w // 2) | GlobalTokens(is_global)``.

>>> import torch
>>> from flexsparse.viz import picture
>>> is_global = torch.tensor([False, False, True, False, False])
>>> print(picture(GlobalTokens(is_global), 5))
..#..
..#..
#####
..#..
..#..
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class GlobalTokens(MaskRule):
    """Pairs of which either is global: join it to a local rule with ``|``.

    ``is_global``: bool ``[kv_len]`` or ``[B, kv_len]``, one a position. Queries must stand among
    the keys.
    """

    is_global: Tensor

    def __post_init__(self) -> None:
        check_table("GlobalTokens", "is_global", self.is_global, "bool", "[kv_len]", "[B, kv_len]")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        chosen = self.is_global
        if chosen.ndim == 1:
            return chosen[q_idx] | chosen[kv_idx]
        return chosen[b, q_idx] | chosen[b, kv_idx]
