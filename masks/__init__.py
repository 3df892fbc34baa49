"""The gallery: one rule a file."""

if __name__ != "flexsparse.masks":
    raise ImportError(f"import the gallery as flexsparse.masks, not as {__name__}")

from flexsparse.masks.a_shape import AShape
from flexsparse.masks.alibi import Alibi
from flexsparse.masks.attention_sink import AttentionSink
from flexsparse.masks.bigbird import BigBird
from flexsparse.masks.block_diagonal import BlockDiagonal
from flexsparse.masks.causal import Causal
from flexsparse.masks.dilated import Dilated
from flexsparse.masks.document import Document
from flexsparse.masks.fixed import Fixed, FixedColumn, FixedLocal
from flexsparse.masks.global_tokens import GlobalTokens
from flexsparse.masks.head_bias import HeadBias
from flexsparse.masks.left_padding import LeftPadding
from flexsparse.masks.log_length import LogLength
from flexsparse.masks.multimodal import Multimodal
from flexsparse.masks.neighborhood import Neighborhood
from flexsparse.masks.per_head import PerHead
from flexsparse.masks.prefix_lm import PrefixLM
from flexsparse.masks.right_padding import RightPadding
from flexsparse.masks.shifted_window import ShiftedWindow
from flexsparse.masks.sliding_tile import SlidingTile
from flexsparse.masks.sliding_window import SlidingWindow
from flexsparse.masks.softcap import Softcap
from flexsparse.masks.strided import Strided, StridedColumn, StridedLocal
from flexsparse.masks.swin_bias import SwinBias
from flexsparse.masks.t5_bias import T5Bias
from flexsparse.masks.temperature import Temperature
from flexsparse.masks.tree import Tree
from flexsparse.masks.vertical_slash import VerticalSlash

__all__ = [
    "AShape",
    "Alibi",
    "AttentionSink",
    "BigBird",
    "BlockDiagonal",
    "Causal",
    "Dilated",
    "Document",
    "Fixed",
    "FixedColumn",
    "FixedLocal",
    "GlobalTokens",
    "HeadBias",
    "LeftPadding",
    "LogLength",
    "Multimodal",
    "Neighborhood",
    "PerHead",
    "PrefixLM",
    "RightPadding",
    "ShiftedWindow",
    "SlidingTile",
    "SlidingWindow",
    "Softcap",
    "Strided",
    "StridedColumn",
    "StridedLocal",
    "SwinBias",
    "T5Bias",
    "Temperature",
    "Tree",
    "VerticalSlash",
]
