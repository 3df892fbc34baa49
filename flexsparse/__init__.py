"""flexsparse: programmable sparse attention, exact, fused and accounted for."""

from flexsparse import adapters
from flexsparse.attention import attention
from flexsparse.building import build_layout
from flexsparse.checking import Report, check
from flexsparse.errors import FlexSparseError
from flexsparse.grid import Grid
from flexsparse.layout import Layout
from flexsparse.merge import Partial, merge
from flexsparse.plan import Plan
from flexsparse.planning import make_plan
from flexsparse.reference import reference
from flexsparse.result import Result
from flexsparse.rules import MaskRule
from flexsparse.scores import ScoreRule
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector
from flexsparse.viz import picture, plot

__version__ = "0.1.0"

__all__ = [
    "FlexSparseError",
    "Grid",
    "Layout",
    "MaskRule",
    "Partial",
    "Plan",
    "Report",
    "Result",
    "ScoreRule",
    "Selection",
    "Selector",
    "adapters",
    "attention",
    "build_layout",
    "check",
    "make_plan",
    "merge",
    "picture",
    "plot",
    "reference",
]
