"""Attention sink: the first keys of the sequence, which every query keeps.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM), 2023,
3.2, https://arxiv.org/abs/2309.17453. StreamingLLM's mask is
``Causal() & (SlidingWindow(w) | AttentionSink(4))``; its renumbering of positions is a matter of the
cache, not of the mask.

Known elsewhere as: initial or sink tokens. A learned sink, as in gpt-oss, is no key: it is the ``sink=``
of `flexsparse.attention`.

>>> from flexsparse.masks.causal import Causal
>>> from flexsparse.masks.sliding_window import SlidingWindow
>>> from flexsparse.viz import picture
>>> print(picture(Causal() & (SlidingWindow(2) | AttentionSink(1)), 5))
#....
##...
###..
#.##.
#..##
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import check_number
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class AttentionSink(MaskRule):
    """The first ``size`` keys, whoever asks: join it to a causal rule. ``size``: keys."""

    size: int = 4

    def __post_init__(self) -> None:
        check_number("AttentionSink", "size", self.size, int, 1)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < self.size
