"""A selector of one's own, proved and accounted for: `python examples/new_selector.py`.

In an experiment it is ``select: {"./new_selector.py:MeanAndSpread": {block: 32, keep: 4, q_block: 1}}``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.selectors.oracle import attention_mass


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanAndSpread(fs.Selector):
    """A block's mean score and ``spread`` standard deviations above, were its channels independent."""

    spread: float = 2.0

    def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
        blocks = k.split(self.block, 2)
        mean = torch.stack([x.mean(2) for x in blocks], 2)  # [B, Hkv, C, D]
        var = torch.stack([x.var(2, correction=0) for x in blocks], 2)
        q = q.unflatten(1, (k.shape[1], -1)).mean(2)  # one query a KV head
        worth = q @ mean.mT + self.spread * (q.square() @ var.mT).sqrt()
        return torch.stack([x.amax(2) for x in worth.split(self.q_block, 2)], 2)  # [B, Hkv, R, C]


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 8, 512, 64)
    k, v = torch.randn(2, 1, 2, 512, 64)
    rule, select = Causal(), MeanAndSpread(block=32, keep=4, q_block=64)

    # Exact, with gradients; and again as the one fused kernel that it becomes.
    fs.check(q, k, v, rule=rule, select=select, grads=True).raise_if_failed()
    report = fs.check(q, k, v, rule=rule, select=select, backend="flex", tile=(64, 32))
    report.raise_if_failed()
    print(report)

    # What was decided and why, and what it costs: what was asked for, and what a kernel touches.
    plan = fs.make_plan(q, k, v, rule=rule, select=select, backend="flex", tile=(64, 32))
    layout = plan.run(q, k, v).layout
    print(plan)
    print(layout.budget())

    seen = layout.select.dense().repeat_interleave(4, 1)
    kept = (attention_mass(q, k, fs.Grid(512, 512), rule, None) * seen).sum(-1).mean()
    print(f"It keeps {kept:.0%} of the attention mass.")


if __name__ == "__main__":
    main()
