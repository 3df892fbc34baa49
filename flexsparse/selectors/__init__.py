"""What is worth seeing, computed from the tensors: one published selector a file."""

from flexsparse.selectors.base import Selector
from flexsparse.selectors.budgets import Mass
from flexsparse.selectors.caches import Cache
from flexsparse.selectors.h2o import H2O
from flexsparse.selectors.infllm_v2 import InfLLMv2
from flexsparse.selectors.mean_pooled import MeanPooled
from flexsparse.selectors.moba import MoBA
from flexsparse.selectors.msa import MSA
from flexsparse.selectors.nsa import NSA
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.oracle_top_p import OracleTopP
from flexsparse.selectors.physical import Tiles, recall
from flexsparse.selectors.pooled import Pooled
from flexsparse.selectors.quest import Quest
from flexsparse.selectors.random import Random
from flexsparse.selectors.reuse import Reuse
from flexsparse.selectors.snap_kv import SnapKV
from flexsparse.selectors.sparge_attn import SpargeAttn
from flexsparse.selectors.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "MSA",
    "NSA",
    "Cache",
    "InfLLMv2",
    "Mass",
    "MeanPooled",
    "MoBA",
    "OracleTopK",
    "OracleTopP",
    "Pooled",
    "Quest",
    "Random",
    "Reuse",
    "Selector",
    "SnapKV",
    "SpargeAttn",
    "StreamingLLM",
    "Tiles",
    "recall",
]
