"""A rule's tiles (full, partial, empty) by running its code on intervals, coarse to fine."""

from flexsparse.intervals.codes import rule_codes
from flexsparse.intervals.reachable import reach
from flexsparse.intervals.refine import RuleTiles, Runs, rule_tiles
from flexsparse.intervals.verdicts import Judge, Verdicts
from flexsparse.intervals.worklists import lists_of

__all__ = [
    "Judge",
    "RuleTiles",
    "Runs",
    "Verdicts",
    "lists_of",
    "reach",
    "rule_codes",
    "rule_tiles",
]
