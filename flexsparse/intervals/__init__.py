"""A rule's tiles (full, partial, empty) by running its code on intervals, coarse to fine."""

from flexsparse.intervals.refine import RuleTiles, Runs, rule_tiles
from flexsparse.intervals.verdicts import Judge, Verdicts
from flexsparse.intervals.worklists import worklists

__all__ = ["Judge", "RuleTiles", "Runs", "Verdicts", "rule_tiles", "worklists"]
