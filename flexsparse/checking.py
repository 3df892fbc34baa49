"""Any result against the reference, under an error budget taken from the data.

Beside each error stands the error of the plain computation in the same precision: dense scores, a
mask, a softmax, a product. A fused kernel may be off by about as much, and by no more. Where a result
is off, the first stage that differs is named: membership (do the tiles amount to rule and
selection?), address (are the tensors where the kernel believes?), or kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexsparse.arguments import Empty, Fallback, check_selection
from flexsparse.choice import BackendName, Pack
from flexsparse.conditioning import term_sizes
from flexsparse.errors import ArgumentError, CheckFailed
from flexsparse.fitting import checked_qkv
from flexsparse.grid import Grid
from flexsparse.plan import Plan
from flexsparse.planning import Choices, Shared, make_plan
from flexsparse.reference import allowed, reference
from flexsparse.rules import MaskMod, as_rule
from flexsparse.scores import ScoreMod, as_score
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector
from flexsparse.shown import Shown

# How much worse than the plain computation a kernel may be: it sums in another order, and rounds the
# answer once more.
ALLOWANCE = 2.0


@dataclass(frozen=True)
class Difference:
    """One quantity beside the reference; errors are largest absolute differences."""

    name: str
    error: float
    plain_error: float
    budget: float
    worst: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return self.error <= self.budget


@dataclass(frozen=True, eq=False, repr=False)
class Report(Shown):
    """What `check` found. ``print(report)`` is its table."""

    plan: Plan
    differences: tuple[Difference, ...]
    stage: str | None
    detail: str | None
    rows: int
    unseeing: tuple[int, int] = (0, 0)
    """How many of the compared rows, each of a sequence, head and query, see no key; and of how many."""

    @property
    def ok(self) -> bool:
        return self.stage is None

    def __getitem__(self, name: str) -> Difference:
        return next(d for d in self.differences if d.name == name)

    def table(self) -> str:
        """One line a quantity: error, the plain computation's error, budget, worst position."""
        lines = [f"{'':10} {'error':>10} {'plain':>10} {'budget':>10}  worst at"]
        for d in self.differences:
            mark = "" if d.ok else "  <- too large"
            lines.append(
                f"{d.name:10} {d.error:10.2e} {d.plain_error:10.2e} {d.budget:10.2e}  "
                f"{list(d.worst)}{mark}"
            )
        lines += [self.remark] if self.remark else []
        verdict = "ok" if self.ok else f"first difference: {self.stage}; {self.detail}"
        return "\n".join([*lines, f"{self.rows} query rows of {self.plan.backend}: {verdict}"])

    @property
    def remark(self) -> str:
        """What is right, and may yet not be what was meant: rows that see no key."""
        none, of = self.unseeing
        if not none:
            return ""
        layout, remedies = self.plan.first, ["empty='error' (refuses them)"]
        select = None if layout is None else layout.select
        if select is not None and select.q_block > select.kv_block:
            remedies[:0] = [
                f"a q_block no wider than the block (here {select.q_block} and {select.kv_block}: what a row "
                "selects may lie past its first queries)"
            ]
        if select is not None:
            remedies[:0] = ["fallback='self' (their own key)"]
        return (
            f"{none:,} of {of:,} rows see no key ({none / of:.1%}), with out 0 and lse -inf; to change "
            f"that: {', '.join(remedies)}"
        )

    def raise_if_failed(self) -> None:
        if not self.ok:
            raise CheckFailed(self.table())

    def __repr__(self) -> str:
        said = "ok" if self.ok else f"first difference: {self.stage}"
        return f"Report({said}, {self.rows} query rows of {self.plan.backend})"

    def __str__(self) -> str:
        return self.table()


# What inference mode makes can take part in no gradient.
@torch.inference_mode(False)
def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: MaskMod | None = None,
    select: Selection | Selector | None = None,
    score: ScoreMod | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    sink: Tensor | None = None,
    fallback: Fallback = None,
    empty: Empty = "zero",
    sanitize: bool = False,
    backend: BackendName = "auto",
    pack: Pack | None = None,
    tile: int | tuple[int, int] | None = None,
    split: int | Literal[False] | None = None,
    cluster: bool | None = None,
    grads: bool = False,
    rows: int | None = None,
    seed: int = 0,
) -> Report:
    """Runs the call and compares it with the reference: out, lse, and with ``grads`` every gradient.

    ``rows=n`` compares n query rows drawn with ``seed``, each of them exactly, in O(n * S): gradients
    are then those of a loss over these rows. Learned tensors of ``score`` and ``sink`` count.
    """
    q, k, v = (x.detach() for x in checked_qkv(q, k, v))
    grid = Grid(q.shape[2], k.shape[2], q_offset=q_offset, batch=q.shape[0])
    if isinstance(select, Selector):
        select = select.select(q, k, grid, as_rule(rule))
    if select is not None:
        check_selection(select, grid, (q.shape[1], k.shape[1]))
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise ArgumentError(f"rows must be a number of query rows of at least 1, got {rows!r}")
    sampled = _rows(grid.q_len, rows, seed).to(q.device)
    common: Shared = {
        "rule": rule, "select": select, "score": score, "scale": scale, "q_offset": q_offset,
        "sink": sink, "fallback": fallback,
    }  # fmt: skip
    forced: Choices = {
        "empty": empty, "sanitize": sanitize, "backend": backend, "pack": pack, "tile": tile,
        "split": split, "cluster": cluster,
    }  # fmt: skip
    with (
        torch.autocast(q.device.type, enabled=False),
        torch.set_grad_enabled(grads),
    ):
        if grads:
            q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        inputs = {"q": q, "k": k, "v": v}
        plan = make_plan(q, k, v, **common, **forced)
        learned = _learned(score, sink) if grads else {}
        weights = _weights(q, v, sampled, seed)
        with_lse = _gives_lse(plan, grads)
        if not with_lse:
            # No gradient through it, neither here nor in what this is held against.
            weights = (weights[0], torch.zeros_like(weights[1]))
        result = plan.run(q, k, v, return_lse=with_lse)
        got = _quantities(result.out, result.lse, sampled, inputs, learned, weights)
        true = _referenced(torch.float64, inputs, learned, weights, sampled, common)
        # fp64 has nothing above it to be judged by: fp32's error, scaled down, stands for it.
        lower = torch.float32 if q.dtype == torch.float64 else q.dtype
        plain = _referenced(lower, inputs, learned, weights, sampled, common)
        sizes = term_sizes(inputs, learned, weights, sampled, common)
    differences = tuple(
        _difference(
            name,
            got[name],
            true[name],
            plain[name],
            sizes[name],
            # A kernel keeps lse in its own precision; all else passes through that of the inputs.
            torch.finfo(got[name].dtype if name == "lse" else _coarser(q, got[name])).eps,
            sampled,
        )
        for name in got
    )
    seen = allowed(
        grid, q.shape[1], rule=rule, select=select, fallback=fallback, rows=sampled
    )  # fmt: skip
    stage, detail = _first_stage(plan, q, sampled, seen, differences)
    sees = seen.any(-1)
    return Report(
        plan, differences, stage, detail, len(sampled), (int((~sees).sum()), sees.numel())
    )


def _gives_lse(plan: Plan, grads: bool) -> bool:
    """Whether a backend has an lse for this call: torch's CPU kernels have none, FlashAttention-4 none
    that gradients flow through."""
    if plan.backend == "flash":
        return not grads
    return grads or plan.backend != "flex" or plan.device.type != "cpu"


def _rows(q_len: int, rows: int | None, seed: int) -> Tensor:
    if rows is None or rows >= q_len:
        return torch.arange(q_len)
    drawn = torch.randperm(q_len, generator=torch.Generator().manual_seed(seed))[:rows]
    return drawn.sort().values


def _learned(score: ScoreMod | None, sink: Tensor | None) -> dict[str, Tensor]:
    """Tensors of the call that get gradients, by name."""
    found: dict[str, Tensor] = {}
    ruled = as_score(score)
    if ruled is not None:
        from flexsparse.scores import trace_score

        for tensor in trace_score(ruled).tensors:
            if tensor.requires_grad and not any(tensor is t for t in found.values()):
                found[f"score{len(found)}"] = tensor
    if sink is not None and sink.requires_grad:
        found["sink"] = sink
    return found


def _weights(q: Tensor, v: Tensor, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The gradients that flow into out and lse: random on the sampled rows."""
    draw = torch.Generator().manual_seed(seed + 1)
    shape = (*q.shape[:2], len(rows))
    out = torch.randn((*shape, v.shape[3]), generator=draw)
    lse = torch.randn(shape, generator=draw)
    return out.to(q.device, q.dtype), lse.to(q.device, q.dtype)


def _quantities(
    out: Tensor,
    lse: Tensor | None,
    rows: Tensor | None,
    inputs: Mapping[str, Tensor],
    learned: Mapping[str, Tensor],
    weights: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """out, lse, and where gradients flow, that of each input and learned tensor."""
    if rows is not None:
        out, lse = out[:, :, rows], None if lse is None else lse[:, :, rows]
    found = {"out": out.detach()}
    if lse is not None:
        found["lse"] = lse.detach()
    leaves = {**inputs, **learned}
    wanted = [x for x in leaves.values() if x.requires_grad]
    if torch.is_grad_enabled() and wanted:
        loss = (out * weights[0].to(out.dtype)).sum()
        if lse is not None:
            # A row that sees nothing has lse -inf and no gradient.
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0) * weights[1].to(lse.dtype)).sum()
        if not loss.requires_grad:
            loss = loss + 0 * sum(x.sum() for x in wanted)
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        names = [f"d{name}" for name, x in leaves.items() if x.requires_grad]
        for name, x, grad in zip(names, wanted, grads, strict=True):
            found[name] = torch.zeros_like(x) if grad is None else grad
    return found


def _referenced(
    dtype: torch.dtype,
    inputs: Mapping[str, Tensor],
    learned: Mapping[str, Tensor],
    weights: tuple[Tensor, Tensor],
    rows: Tensor,
    common: Shared,
) -> dict[str, Tensor]:
    leaves = {
        name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in inputs.items()
    }
    q, k, v = leaves.values()
    out, lse = reference(q, k, v, **common, rows=rows, dtype=dtype)
    return _quantities(out, lse, None, leaves, learned, weights)


def _difference(
    name: str, got: Tensor, true: Tensor, plain: Tensor, size: float, eps: float, rows: Tensor
) -> Difference:
    off = _distance(got, true)
    plain_error = float(_distance(plain, true).max()) if plain.numel() else 0.0
    if got.dtype == torch.float64:
        plain_error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    # One rounding of each term alone costs eps * size.
    expected = plain_error + eps * size
    # A reference in the same precision is itself as far off as the plain computation.
    budget = ALLOWANCE * expected + (expected if got.dtype == torch.float64 else 0)
    if not off.numel():
        return Difference(name, 0.0, plain_error, budget, ())
    flat = int(off.argmax())
    worst = [int(i) for i in torch.unravel_index(torch.tensor(flat), off.shape)]
    if name in ("out", "lse"):
        worst[2] = int(rows[worst[2]])
    return Difference(name, float(off.flatten()[flat]), plain_error, budget, tuple(worst))


def _coarser(a: Tensor, b: Tensor) -> torch.dtype:
    return max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|, where equal infinities differ by 0 and a NaN by infinity."""
    a, b = a.detach().double(), b.detach().double()
    off = torch.where(a == b, 0.0, (a - b).abs())
    return off.nan_to_num(nan=torch.inf)


def _first_stage(
    plan: Plan,
    q: Tensor,
    rows: Tensor,
    seen: Tensor,
    differences: Sequence[Difference],
) -> tuple[str | None, str | None]:
    layout = plan.first
    assert layout is not None
    wrong = layout.dense(rows) != seen
    if bool(wrong.any()):
        b, h, row, key = (int(i) for i in wrong.nonzero()[0])
        more = "sees" if not bool(seen[b, h, row, key]) else "does not see"
        return "membership", (
            f"in the tiles, query {int(rows[row])} of batch {b}, head {h} {more} key {key}, against "
            "rule and selection"
        )
    if (detail := _misplaced(plan, q)) is not None:
        return "address", detail
    late = [d for d in differences if not d.ok]
    if late:
        return "kernel", f"{late[0].name} is off by {late[0].error:.2e} at {list(late[0].worst)}"
    return None, None


def _misplaced(plan: Plan, q: Tensor) -> str | None:
    """Whether each kernel coordinate holds the sequence, head and query that the address says."""
    batch, heads, q_len, _ = q.shape
    ids = torch.arange(batch * heads * q_len, device=q.device).view(batch, heads, q_len, 1)
    packed = plan.address.pack(ids, "q")
    b, h, row = (torch.arange(n, device=q.device) for n in packed.shape[:3])
    at = plan.address.logical(b[:, None, None], h[None, :, None], row[None, None], row[None, None])
    said = (at[0] * heads + at[1]) * q_len + at[2]
    if not bool((said == packed[..., 0]).all()):
        return f"{plan.address} places a query where its logical coordinates do not say"
    if not torch.equal(plan.address.unpack(packed, batch), ids):
        return f"{plan.address} does not return outputs to their places"
    return None
