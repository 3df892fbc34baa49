"""The gallery: one rule a file."""

if __name__ != "flexsparse.masks":
    raise ImportError(f"import the gallery as flexsparse.masks, not as {__name__}")

from flexsparse.masks.alibi import Alibi
from flexsparse.masks.attention_sink import AttentionSink
from flexsparse.masks.causal import Causal
from flexsparse.masks.document import Document
from flexsparse.masks.head_bias import HeadBias
from flexsparse.masks.left_padding import LeftPadding
from flexsparse.masks.prefix_lm import PrefixLM
from flexsparse.masks.right_padding import RightPadding
from flexsparse.masks.sliding_window import SlidingWindow
from flexsparse.masks.softcap import Softcap

__all__ = [
    "Alibi",
    "AttentionSink",
    "Causal",
    "Document",
    "HeadBias",
    "LeftPadding",
    "PrefixLM",
    "RightPadding",
    "SlidingWindow",
    "Softcap",
]
