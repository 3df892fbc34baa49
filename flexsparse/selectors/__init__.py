"""What is worth seeing, computed from the tensors: one published selector a file."""

from flexsparse.selectors.a_shape_blocks import AShapeBlocks
from flexsparse.selectors.base import Selector
from flexsparse.selectors.block_sparse import BlockSparse
from flexsparse.selectors.budgets import Mass
from flexsparse.selectors.caches import Cache
from flexsparse.selectors.flex_prefill import FlexPrefill
from flexsparse.selectors.gym_indexer import GymIndexer
from flexsparse.selectors.h2o import H2O
from flexsparse.selectors.infllm_v2 import InfLLMv2
from flexsparse.selectors.lightning_indexer import LightningIndexer
from flexsparse.selectors.mean_pooled import MeanPooled
from flexsparse.selectors.minference import MInference
from flexsparse.selectors.moba import MoBA
from flexsparse.selectors.msa import MSA
from flexsparse.selectors.nsa import NSA
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.oracle_top_p import OracleTopP
from flexsparse.selectors.physical import Tiles, recall
from flexsparse.selectors.pooled import Pooled
from flexsparse.selectors.quest import Quest
from flexsparse.selectors.random import Random
from flexsparse.selectors.reformer_lsh import ReformerLSH
from flexsparse.selectors.retrieval import Retrieval
from flexsparse.selectors.reuse import Reuse
from flexsparse.selectors.routing import Routing
from flexsparse.selectors.seer_gate import SeerAttentionGate
from flexsparse.selectors.snap_kv import SnapKV
from flexsparse.selectors.sparge_attn import SpargeAttn
from flexsparse.selectors.streaming_llm import StreamingLLM
from flexsparse.selectors.tile_budget import TileBudget
from flexsparse.selectors.twilight import Twilight
from flexsparse.selectors.vertical_slash_blocks import VerticalSlashBlocks
from flexsparse.selectors.xattention import XAttention

__all__ = [
    "H2O",
    "MSA",
    "NSA",
    "AShapeBlocks",
    "BlockSparse",
    "Cache",
    "FlexPrefill",
    "GymIndexer",
    "InfLLMv2",
    "LightningIndexer",
    "MInference",
    "Mass",
    "MeanPooled",
    "MoBA",
    "OracleTopK",
    "OracleTopP",
    "Pooled",
    "Quest",
    "Random",
    "ReformerLSH",
    "Retrieval",
    "Reuse",
    "Routing",
    "SeerAttentionGate",
    "Selector",
    "SnapKV",
    "SpargeAttn",
    "StreamingLLM",
    "TileBudget",
    "Tiles",
    "Twilight",
    "VerticalSlashBlocks",
    "XAttention",
    "recall",
]
