"""A rule's tiles (full, partial, empty) by running its code on intervals, coarse to fine."""

from flexsparse.intervals.codes import rule_codes
from flexsparse.intervals.reachable import reach
from flexsparse.intervals.refine import rule_tiles
from flexsparse.intervals.runs import RuleTiles, Runs
from flexsparse.intervals.verdicts import Judge, Verdicts
from flexsparse.intervals.worklists import lists_of, rule_lists

__all__ = [
    "Judge",
    "RuleTiles",
    "Runs",
    "Verdicts",
    "lists_of",
    "reach",
    "rule_codes",
    "rule_lists",
    "rule_tiles",
]
