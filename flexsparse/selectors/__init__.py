"""What is worth seeing, computed from the tensors: one published selector a file."""

from flexsparse.selectors.a_shape_blocks import AShapeBlocks
from flexsparse.selectors.base import Selector
from flexsparse.selectors.block_sparse import BlockSparse
from flexsparse.selectors.flex_prefill import FlexPrefill
from flexsparse.selectors.minference import MInference
from flexsparse.selectors.oracle import OracleTopK
from flexsparse.selectors.quest import Quest
from flexsparse.selectors.random import Random
from flexsparse.selectors.twilight import Twilight
from flexsparse.selectors.vertical_slash_blocks import VerticalSlashBlocks
from flexsparse.selectors.xattention import XAttention

__all__ = [
    "AShapeBlocks",
    "BlockSparse",
    "FlexPrefill",
    "MInference",
    "OracleTopK",
    "Quest",
    "Random",
    "Selector",
    "Twilight",
    "VerticalSlashBlocks",
    "XAttention",
]
