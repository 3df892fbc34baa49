"""Tree: a branching draft after a common prefix; each token sees its own ancestors only.

Source: Miao et al., "SpecInfer", 2023, 4 (topology-aware causal mask),
https://arxiv.org/abs/2305.09781.

Known elsewhere as: tree attention, tree mask; of Medusa (2024) and EAGLE.

>>> import torch
>>> from flexsparse.viz import picture
>>> parents = torch.tensor([-1, 0, 0, 1, 2])
>>> print(picture(Tree.of_parents(parents, start=3), 5, 8))
####....
#####...
####.#..
#####.#.
####.#.#
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsparse.errors import RuleError, check_number, check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class Tree(MaskRule):
    """The prefix, and of the tree's tokens the query itself and its ancestors.

    ``ancestors``: bool ``[N, N]`` or ``[B, N, N]``, which token (last axis) a token of the tree
    sees; ``start``: the position of the tree's first token, an int or int ``[B]``. Before it the
    rule is causal; positions past the tree neither see nor are seen.
    """

    ancestors: Tensor
    start: int | Tensor

    def __post_init__(self) -> None:
        check_table("Tree", "ancestors", self.ancestors, "bool", "[N, N]", "[B, N, N]")
        if self.ancestors.shape[-1] != self.ancestors.shape[-2] or not self.ancestors.numel():
            raise RuleError(
                f"Tree ancestors must be square and not empty, got {list(self.ancestors.shape)}"
            )
        if isinstance(self.start, Tensor) and self.start.ndim:
            check_table("Tree", "start", self.start, "int", "[B]")
        else:
            check_number("Tree", "start", self.start, int, 0)

    @staticmethod
    def of_parents(parents: Tensor, start: int | Tensor) -> "Tree":
        """From the parent of each token, int ``[N]`` or ``[B, N]``: an earlier token, or -1."""
        check_table("Tree", "parents", parents, "int", "[N]", "[B, N]")
        above = parents.to(torch.int64)[..., None]
        at = torch.arange(parents.shape[-1], device=parents.device)
        if not bool(((above >= -1) & (above < at[:, None])).all()):
            raise RuleError("Tree parents must be -1 or the index of an earlier token of the tree")
        is_parent = above == at
        seen = (at[:, None] == at).expand(is_parent.shape).clone()
        for token in range(len(at)):
            # Its parent comes before it, so that the parent's row is whole.
            seen[..., token, :] |= (is_parent[..., token, :, None] & seen).any(-2)
        return Tree(seen, start)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = self.start
        if isinstance(start, Tensor) and start.ndim == 1:
            start = start[b]
        last = self.ancestors.shape[-1] - 1
        row, column = q_idx - start, kv_idx - start
        at, of = row.clamp(0, last), column.clamp(0, last)
        above = self.ancestors[at, of] if self.ancestors.ndim == 2 else self.ancestors[b, at, of]
        # Clamped: a token outside the tree stands nowhere in the table.
        above = above & (at == row) & (of == column)
        return above | ((column < 0) & (kv_idx <= q_idx) & (row <= last))
