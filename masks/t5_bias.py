"""T5 bias: a learned bias for each head and bucket of relative positions, finer near than far.

Source: Raffel et al., "T5", 2020, 2.1, https://arxiv.org/abs/1910.10683; buckets as its code has
them: half of them single distances, the rest of logarithmic width up to ``max_distance``.

Known elsewhere as: ``relative_attention_bias`` of T5, mT5, UL2 and others, ``[buckets, Hq]`` there and
transposed here. T5 does not scale its scores: call with ``scale=1.0``.

>>> import torch
>>> score = T5Bias(torch.arange(8.0)[None], bidirectional=False, max_distance=16)
>>> at = torch.tensor
>>> [int(score(at(0.0), at(0), at(0), at(20), at(20 - behind)).item()) for behind in (0, 1, 4, 6, 20)]
[0, 1, 4, 5, 7]
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, RuleError, check_number, check_table
from flexsparse.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class T5Bias(ScoreRule):
    """Adds ``bias[h, bucket]``, the bucket of how far the key lies from the query.

    ``bias``: float ``[Hq, buckets]``, learned if it requires gradients; ``bidirectional``: an
    encoder's half of the buckets for keys after the query, or a decoder's one bucket 0 for them;
    ``max_distance``: positions, from which on all share the last bucket.
    """

    bias: Tensor
    bidirectional: bool
    max_distance: int = field(default=128, metadata={"static": True})
    bucket_of: Tensor = field(init=False)
    """int32 ``[2 * max_distance + 1]``: the bucket of key minus query, from -max_distance on."""

    def __post_init__(self) -> None:
        check_table("T5Bias", "bias", self.bias, "float", "[Hq, buckets]")
        if not isinstance(self.bidirectional, bool):
            raise ArgumentError(
                f"T5Bias bidirectional must be true or false, got {self.bidirectional!r}"
            )
        check_number("T5Bias", "max_distance", self.max_distance, int, 1)
        side = self.bias.shape[1] // 2 if self.bidirectional else self.bias.shape[1]
        if side < 2 or self.max_distance <= side // 2:
            raise RuleError(
                "T5Bias needs two buckets a direction and a max_distance beyond the single ones, got "
                f"{self.bias.shape[1]} buckets and max_distance {self.max_distance}"
            )
        buckets = _table(side, self.bidirectional, self.max_distance)
        object.__setattr__(self, "bucket_of", buckets.to(self.bias.device))

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        reach = self.bucket_of.shape[0] // 2
        bucket = self.bucket_of[(kv_idx - q_idx).clamp(-reach, reach) + reach]
        return score + self.bias[h, bucket]


def _table(side: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bucket of every relative position in reach; a table, since logarithms round by device."""
    far = [_bucket(n, side, max_distance) for n in range(max_distance + 1)]
    after = [side + n for n in far[1:]] if bidirectional else [0] * max_distance
    return torch.tensor([*far[:0:-1], far[0], *after], dtype=torch.int32)


def _bucket(distance: int, side: int, max_distance: int) -> int:
    """Single distances up to half of ``side`` buckets, then as many equal steps of the logarithm.

    In whole numbers, distance**steps * exact**k >= max_distance**k * exact**steps, so that a distance on the
    border of two buckets is never rounded into the wrong one.
    """
    exact = side // 2
    if distance < exact:
        return distance
    steps = side - exact
    passed = 0
    while passed < steps - 1:
        border = max_distance ** (passed + 1) * exact**steps
        if distance**steps * exact ** (passed + 1) < border:
            break
        passed += 1
    return exact + passed
