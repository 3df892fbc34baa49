"""What is worth seeing, computed from the tensors: one published selector a file."""

from flexsparse.selectors.base import Selector
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.quest import Quest
from flexsparse.selectors.random import Random

__all__ = ["OracleTopK", "Quest", "Random", "Selector"]
