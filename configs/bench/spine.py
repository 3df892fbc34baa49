"""What the spine costs on a GPU: layout and kernel of block top-k, token top-k and decode, beside dense.

    python configs/bench/spine.py

Median of `triton.testing.do_bench`, bf16, D=128, random data. Every sparse row is checked against the
fp64 reference on sampled rows before it is timed. Ratios are taken against the fastest dense
baseline of the same run; the layout is inside ``total``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

import flexsparse as fs
from flexsparse.masks import Causal

DEVICE = torch.device("cuda")


def tensors(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return tuple(
        torch.randn(batch, h, n, 128, device=DEVICE, dtype=torch.bfloat16) for h, n in shapes
    )


def median(work: Callable[[], object]) -> float:
    return float(do_bench(work, return_mode="median"))


def backward(forward: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> float:
    """Forward and backward together, in ms."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    flow = torch.randn_like(q)

    def both() -> None:
        torch.autograd.grad(forward(*leaves), leaves, flow)

    return median(both)


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, float]:
    """ms of each dense baseline that runs here."""
    found = {}
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items():
        with sdpa_kernel(backend):
            found[name] = median(
                lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            )
    return found


def dense_backward(q: Tensor, k: Tensor, v: Tensor) -> float:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return backward(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            q, k, v,
        )  # fmt: skip


def past_blocks(rows: int, heads: int, keep: int) -> Tensor:
    """``[1, heads, rows, keep]``: the own block and random earlier ones."""
    rank = torch.rand(1, heads, rows, rows, device=DEVICE)
    row = torch.arange(rows, device=DEVICE)
    rank = rank.masked_fill(row[None] > row[:, None], -1)
    rank[..., row, row] = 2
    value, index = rank.topk(min(keep, rows), dim=-1)
    return torch.where(value >= 0, index, -1)


def row(
    name: str, plan: fs.Plan, select: fs.Selection, qkv: tuple[Tensor, ...], base: float
) -> str:
    q, k, v = qkv
    report = fs.check(q, k, v, rule=plan.rule, select=select, rows=64)
    report.raise_if_failed()
    layout = median(lambda: plan.layout(select))
    run = median(lambda: plan.run(q, k, v))
    budget = plan.first.budget() if plan.first else None
    assert budget is not None
    promised = budget.dense_pairs / (2 if plan.rule is not None else 1) / budget.logical_pairs
    total = layout + run
    return (
        f"| {name} | {budget.inflation:.2f} | {layout:.3f} | {run:.3f} | {total:.3f} | "
        f"{base / run:.2f} | {base / total:.2f} | {promised:.2f} | {base / total / promised:.3f} | "
        f"{report['out'].error:.1e} ({report['out'].plain_error:.1e}) |"
    )


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, D=128, ms")
    print(
        "| row | inflation | layout | kernel | total | dense/kernel | dense/total | promised | delivered | error (plain) |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for length in (16384, 32768):
        q, k, v = tensors(1, 32, 8, length, length)
        base = dense(q, k, v, causal=True)
        print(
            f"| dense causal, S={length} | | | "
            + ", ".join(f"{n} {t:.2f}" for n, t in base.items())
            + " | | | | | | |"
        )
        blocks = past_blocks(length // 128, 8, 16)
        select = fs.Selection.from_indices(
            blocks, kv_len=length, q_len=length, q_block=128, kv_block=128
        )
        plan = fs.make_plan(q, k, v, rule=Causal(), select=select)
        print(
            row(
                f"block top-k 16 of {length // 128}, S={length}",
                plan,
                select,
                (q, k, v),
                min(base.values()),
            )
        )
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        training = fs.make_plan(*leaves, rule=Causal(), select=select)
        both = backward(lambda q, k, v, plan=training: plan.run(q, k, v).out, q, k, v)
        print(
            f"| the same, forward+backward | | | {both:.2f} | | {dense_backward(q, k, v) / both:.2f} | | | | |"
        )
    q, k, v = tensors(1, 32, 8, 16384, 16384)
    base = dense(q, k, v, causal=True)
    rows = torch.arange(16384, device=DEVICE)
    tokens = (torch.rand(1, 1, 16384, 1024, device=DEVICE) * (rows[:, None] + 1)).long()
    select = fs.Selection.from_indices(tokens, kv_len=16384, q_len=16384)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select)
    print(row("token top-k 1024, one list, S=16384", plan, select, (q, k, v), min(base.values())))
    for batch in (1, 32):
        q, k, v = tensors(batch, 32, 8, 1, 32768)
        base = dense(q, k, v, causal=False)
        pages = torch.rand(batch, 8, 1, 512, device=DEVICE).topk(32, dim=-1).indices
        select = fs.Selection.from_indices(pages, kv_len=32768, q_len=1, kv_block=64)
        plan = fs.make_plan(q, k, v, select=select)
        print(
            f"| dense decode, B={batch} | | | "
            + ", ".join(f"{n} {t:.3f}" for n, t in base.items())
            + " | | | | | | |"
        )
        print(
            row(f"decode, 32 of 512 pages, B={batch}", plan, select, (q, k, v), min(base.values()))
        )


if __name__ == "__main__":
    main()
