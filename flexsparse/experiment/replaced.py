"""A whole model with a row's attention in every layer: what it foretells, and what it reads."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from flexsparse import hf
from flexsparse.budget import Budget
from flexsparse.experiment.model import Read
from flexsparse.result import Result


class Replaced:
    """The model of an input; `own` is its perplexity as it is."""

    def __init__(self, read: Read) -> None:
        self.read = read

    @cached_property
    def own(self) -> float:
        return self.read.perplexity()

    def measure(self, **attention: Any) -> dict[str, Any]:
        """The perplexity with this attention, and the pairs of all layers.

        ``attention``: the keywords of `flexsparse.hf.use`.
        """
        budgets: list[Budget] = []

        def told(layer: int, result: Result) -> None:
            budgets.append(result.budget())

        with hf.use(self.read.model, **attention, told=told):
            value = self.read.perplexity()
        return {
            "value": value,
            "layers": len(budgets),
            "logical_pairs": sum(budget.logical_pairs for budget in budgets),
            "physical_pairs": sum(budget.physical_pairs for budget in budgets),
        }
