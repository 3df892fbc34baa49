"""What is worth seeing, computed from the tensors: one published selector a file."""

from flexsparse.selectors.base import Selector
from flexsparse.selectors.budgets import Mass
from flexsparse.selectors.caches import Cache
from flexsparse.selectors.mean_pooled import MeanPooled
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.oracle_top_p import OracleTopP
from flexsparse.selectors.physical import Tiles, recall
from flexsparse.selectors.pooled import Pooled
from flexsparse.selectors.quest import Quest
from flexsparse.selectors.random import Random

__all__ = [
    "Cache",
    "MeanPooled",
    "Mass",
    "OracleTopK",
    "OracleTopP",
    "Pooled",
    "Quest",
    "Random",
    "Selector",
    "Tiles",
    "recall",
]
