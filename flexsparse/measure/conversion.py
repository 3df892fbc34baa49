"""This library's conversion of a problem, and the bytes it keeps and must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from flexsparse.budget import Budget
from flexsparse.building import build_layout
from flexsparse.choice import BackendName, Pack
from flexsparse.layout import Layout
from flexsparse.measure.problem import Problem
from flexsparse.plan import Plan
from flexsparse.planning import make_plan


@dataclass(frozen=True, eq=False)
class Conversion:
    """``call`` makes the layout from what the problem gives; ``layout`` is one that it made.

    ``plan`` and its tensors are None where a rule is converted and no attention is wanted.
    """

    problem: Problem
    call: Callable[[], Layout]
    layout: Layout
    plan: Plan | None = None
    qkv: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over a finished layout."""
        plan, layout = self._planned
        return plan.run(q, k, v, layout).out

    def attend_anew(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with all that stands before it at every call."""
        plan, _ = self._planned
        return plan.run(q, k, v, self.before()).out

    def before(self) -> Layout:
        """What stands before attention at every call: the layout of raw indices; of a fresh rule its
        tiles; of one that stays nothing."""
        plan, layout = self._planned
        if not self.problem.fresh:
            return plan.layout(self.problem.select())
        # As much work as another's: the tiles of this one are known already.
        self.call()
        return layout

    @property
    def layout_of_plan(self) -> Layout:
        """The layout that attention is timed over."""
        return self._planned[1]

    @property
    def budget(self) -> Budget:
        """What attention over it touches."""
        plan, layout = self._planned
        return plan.budget(layout)

    @cached_property
    def _planned(self) -> tuple[Plan, Layout]:
        """The plan, and a layout of its own: what a rule's conversion makes may belong to no plan."""
        assert self.plan is not None
        return self.plan, self.plan.layout(self.problem.select())

    @property
    def kept_bytes(self) -> int:
        """Lists and tables that stay while attention runs."""
        return _bytes(*self.layout.lists, *self.layout.tables)

    @property
    def fewest_bytes(self) -> int:
        """Indices read once, lists and membership words written once: no conversion moves less."""
        given = [] if self.problem.indices is None else [self.problem.indices]
        layout = self.layout
        words = [] if layout.select is None else [layout.tables[layout.program.words_at]]
        return _bytes(*given, *layout.lists, *words)


def conversion(
    problem: Problem,
    *,
    attention: bool,
    seed: int,
    backend: BackendName = "auto",
    pack: Pack | None = None,
) -> Conversion:
    """A selection is converted by a plan, which knows the rule's tiles; a rule from nothing."""
    plan = qkv = None
    if attention or problem.indices is not None:
        qkv = problem.qkv(seed)
        plan = make_plan(
            *qkv, rule=problem.rule, select=problem.select(), tile=problem.tile, backend=backend,
            pack=pack,
        )  # fmt: skip
    call = _of_rule(problem) if problem.indices is None or plan is None else _of(problem, plan)
    return Conversion(problem, call, call(), plan, qkv)


def _of(problem: Problem, plan: Plan) -> Callable[[], Layout]:
    return lambda: plan.layout(problem.select())


def _of_rule(problem: Problem) -> Callable[[], Layout]:
    return lambda: build_layout(
        rule=problem.rule,
        grid=problem.grid,
        heads=problem.heads,
        block_size=problem.tile or 128,
        device=problem.device,
        exact=True,
    )


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
