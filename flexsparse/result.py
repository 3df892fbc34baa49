"""What a run gives: the output, and what computed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from flexsparse.budget import Budget
from flexsparse.errors import ArgumentError
from flexsparse.layout import Layout
from flexsparse.merge import Partial
from flexsparse.telling import tensor

if TYPE_CHECKING:
    from flexsparse.plan import Plan


class Result(NamedTuple):
    """``out [B, Hq, Q, Dv]``, ``lse [B, Hq, Q]`` where asked for, and what computed them."""

    out: Tensor
    lse: Tensor | None
    plan: Plan
    layout: Layout

    @property
    def partial(self) -> Partial:
        """For `merge`; needs ``return_lse=True``."""
        if self.lse is None:
            raise ArgumentError("this result has no lse: run the plan with return_lse=True")
        return Partial(self.out, self.lse)

    def budget(self) -> Budget:
        """What the algorithm asked for, and what the backend that ran touched. Reads the device.

        Counted from the layout as it is: ask before other candidates are written into it.
        """
        return self.plan._budget(self.layout, self.lse is not None, self.out.requires_grad)

    def __repr__(self) -> str:
        lse = "" if self.lse is None else f"lse {tensor(self.lse)}, "
        return f"Result(out {tensor(self.out)}, {lse}by {self.plan.backend})"
