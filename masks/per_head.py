"""Per head: different rules for different heads.

Source: Jiang et al., "MInference 1.0", 2024, 3 (a pattern of its own for each head),
https://arxiv.org/abs/2407.02490; retrieval and streaming heads in Xiao et al., "DuoAttention", 2024,
https://arxiv.org/abs/2410.10819.

Known elsewhere as: head-wise patterns, hybrid heads.

>>> from flexsparse.masks.causal import Causal
>>> from flexsparse.masks.sliding_window import SlidingWindow
>>> from flexsparse.viz import picture
>>> print(picture(PerHead((Causal(), SlidingWindow(2))), 4, h=1))
#...
##..
.##.
..##
"""

from dataclasses import dataclass

from torch import Tensor

from flexsparse.errors import ArgumentError, RuleError, check_table
from flexsparse.rules import MaskRule


@dataclass(frozen=True, eq=False)
class PerHead(MaskRule):
    """Head h is under ``rules[rule_of[h]]``; every rule is evaluated, so few of them are cheap.

    ``rules``: a tuple of rules; ``rule_of``: int ``[Hq]``, which of them a head is under. Without
    it the heads take the rules in turn, the first again after the last.
    """

    rules: tuple[MaskRule, ...]
    rule_of: Tensor | None = None

    def __post_init__(self) -> None:
        given = self.rules
        if not isinstance(given, tuple) or not given:
            raise ArgumentError(f"PerHead rules must be a tuple of rules, got {given!r}")
        for rule in given:
            if not isinstance(rule, MaskRule):
                raise ArgumentError(
                    f"PerHead rules must be rules, got {rule!r}: wrap a function as MaskRule.of(fn)"
                )
        if self.rule_of is not None:
            check_table("PerHead", "rule_of", self.rule_of, "int", "[Hq]")
            outside = (self.rule_of < 0) | (self.rule_of >= len(given))
            if bool(outside.any()):
                raise RuleError(
                    f"PerHead rule_of must lie in 0..{len(given) - 1}, got "
                    f"{int(self.rule_of[outside][0])}"
                )

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = h % len(self.rules) if self.rule_of is None else self.rule_of[h]
        seen = (own == 0) & self.rules[0](b, h, q_idx, kv_idx)
        for i, rule in enumerate(self.rules[1:], 1):
            seen = seen | ((own == i) & rule(b, h, q_idx, kv_idx))
        return seen
