"""What is worth seeing, computed from the tensors: one published selector a file."""

from flexsparse.selectors.base import Selector
from flexsparse.selectors.lightning_indexer import LightningIndexer
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.quest import Quest
from flexsparse.selectors.random import Random
from flexsparse.selectors.reformer_lsh import ReformerLSH
from flexsparse.selectors.retrieval import Retrieval
from flexsparse.selectors.routing import Routing
from flexsparse.selectors.seer_gate import SeerAttentionGate
from flexsparse.selectors.tile_budget import TileBudget

__all__ = [
    "LightningIndexer",
    "OracleTopK",
    "Quest",
    "Random",
    "ReformerLSH",
    "Retrieval",
    "Routing",
    "SeerAttentionGate",
    "Selector",
    "TileBudget",
]
