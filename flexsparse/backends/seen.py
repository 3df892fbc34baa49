"""Which keys of its candidate blocks each query sees, as bits, by one kernel for each kind of rule."""

from __future__ import annotations

from torch import Tensor

from flexsparse.backends.candidates import Candidates
from flexsparse.backends.compiled import Kernel, entered


def seen_bits(candidates: Candidates, k: Tensor) -> Tensor | None:
    """`Candidates.seen` compiled, so that nothing as long as the keys is written; None without a rule,
    where each query sees every key of its blocks. ``k [B, Hkv, S, D]`` tells how many there are."""
    if candidates.rule.rule is None:
        return None
    facts = candidates._replace(indices=candidates.indices[:0], tables=())
    kind = ("seen", facts.rule.key, *facts[1:4], *facts[6:9])

    def make() -> Kernel:
        def seen(indices: Tensor, k: Tensor, tables: list[Tensor]) -> Tensor:
            return facts._replace(indices=indices, tables=tables, kv_len=k.shape[2]).seen()

        return seen

    call = (candidates.indices, k.detach(), list(candidates.tables))
    bits: Tensor
    bits, _ = entered(kind, call, make, f"seen/{facts.rule.key}", lambda: "seen keys")
    return bits
