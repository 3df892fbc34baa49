"""Vertical-slash: a few columns that all later queries see, and a few diagonals.

Source: Jiang et al., "MInference 1.0", 2024, 3 (vertical-slash pattern),
https://arxiv.org/abs/2407.02490.

Known elsewhere as: ``vertical_and_slash`` of MInference and FlexPrefill.

>>> import torch
>>> from flexsparse.viz import picture
>>> columns, offsets = torch.tensor([[0, 3]]), torch.tensor([[0, 2]])
>>> print(picture(VerticalSlash.of_indices(columns, offsets, 7), 7))
#......
##.....
#.#....
##.#...
#.###..
#..#.#.
#..##.#
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import RuleError, check_number, check_table
from flexsparse.rules import MaskRule

_FORMS = ("[Hq, kv_len]", "[B, Hq, kv_len]")


@dataclass(frozen=True, eq=False)
class VerticalSlash(MaskRule):
    """Chosen columns and chosen distances, of each head's own; causal by itself.

    ``vertical``: bool ``[Hq, kv_len]`` or ``[B, Hq, kv_len]``, one a key position; ``slash``: the
    same, one a distance from query back to key. `of_indices` makes both from lists.
    """

    vertical: Tensor
    slash: Tensor

    def __post_init__(self) -> None:
        check_table("VerticalSlash", "vertical", self.vertical, "bool", *_FORMS)
        check_table("VerticalSlash", "slash", self.slash, "bool", *_FORMS)

    @staticmethod
    def of_indices(vertical: Tensor, slash: Tensor, kv_len: int) -> "VerticalSlash":
        """From key positions and distances, int ``[Hq, n]`` or ``[B, Hq, n]``, -1 for none."""
        check_number("VerticalSlash", "kv_len", kv_len, int, 1)
        return VerticalSlash(_marked("vertical", vertical, kv_len), _marked("slash", slash, kv_len))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).clamp(0, self.slash.shape[-1] - 1)
        column = (
            self.vertical[h, kv_idx] if self.vertical.ndim == 2 else self.vertical[b, h, kv_idx]
        )
        diagonal = self.slash[h, distance] if self.slash.ndim == 2 else self.slash[b, h, distance]
        return (kv_idx <= q_idx) & (column | diagonal)


def _marked(field: str, indices: Tensor, kv_len: int) -> Tensor:
    """Lists of positions as a bool table; slot ``kv_len`` takes the unused entries."""
    check_table("VerticalSlash", field, indices, "int", "[Hq, n]", "[B, Hq, n]")
    outside = indices[(indices < -1) | (indices >= kv_len)]
    if len(outside):
        raise RuleError(
            f"VerticalSlash {field} must lie in 0..{kv_len - 1}, or be -1 for none, got "
            f"{int(outside[0])}"
        )
    table = torch.zeros((*indices.shape[:-1], kv_len + 1), dtype=torch.bool, device=indices.device)
    slots = torch.where(indices < 0, kv_len, indices).to(torch.int64)
    return table.scatter(-1, slots, True)[..., :-1].contiguous()
