"""What is worth seeing, computed from the tensors: one published selector a file."""

from flexsparse.selectors.base import Selector
from flexsparse.selectors.infllm_v2 import InfLLMv2
from flexsparse.selectors.moba import MoBA
from flexsparse.selectors.msa import MSA
from flexsparse.selectors.nsa import NSA
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.quest import Quest
from flexsparse.selectors.random import Random
from flexsparse.selectors.sparge_attn import SpargeAttn

__all__ = [
    "MSA",
    "NSA",
    "InfLLMv2",
    "MoBA",
    "OracleTopK",
    "Quest",
    "Random",
    "Selector",
    "SpargeAttn",
]
