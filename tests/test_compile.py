"""One kernel a kind of rule, and user code that compiles around flexsparse."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse import tracing
from flexsparse.choice import BackendName, Pack
from flexsparse.device import compiles
from flexsparse.masks import Alibi, Causal, SlidingWindow, Softcap
from flexsparse.program import mask_of, score_of
from flexsparse.selectors import Quest


def qkv(device: torch.device, length: int = 100, heads: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, heads, length, 16), (2, 2, length, 16), (2, 2, length, 16))
    q, k, v = (torch.randn(s, generator=draw).to(device) for s in shapes)
    return q, k, v


def kinds(device: torch.device) -> list[Callable[..., Tensor]]:
    """Forty rules no two of which have the same code."""
    table = torch.arange(100, device=device) % 7
    causal = [lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q > kv]
    near = [lambda b, h, q, kv: (q - kv).abs() < 9, lambda b, h, q, kv: q - kv < 30]
    read = [
        lambda b, h, q, kv: table[q] == table[kv],
        lambda b, h, q, kv: table[kv] > 2,
        lambda b, h, q, kv: table[q] + h < table[kv] + 5,
    ]
    grid = [
        lambda b, h, q, kv: q // 8 == kv // 8,
        lambda b, h, q, kv: (q - kv) % 3 == 0,
        lambda b, h, q, kv: torch.where(q > 50, kv > 20, kv < 70),
    ]
    rules = [fs.MaskRule.of(m) for m in (*causal, *near, *read, *grid)]
    pairs = [a & b for i, a in enumerate(rules) for b in rules[i + 1 :]]
    return [*rules, *pairs][:40]


def run_kinds(device: torch.device, count: int) -> None:
    q, k, v = qkv(device)
    before = int(compiles)
    for rule in kinds(device)[:count]:
        out = fs.attention(q, k, v, rule=rule, backend="flex")
        torch.testing.assert_close(
            out.double(), fs.reference(q, k, v, rule=rule).out, atol=1e-5, rtol=1e-5
        )
    assert int(compiles) - before == count
    again = int(compiles)
    for rule in kinds(device)[:count]:
        fs.attention(q, k, v, rule=rule, backend="flex")
    assert int(compiles) == again, "the same kinds, written anew, are the same kernels"


def test_each_kind_of_rule_compiles_once(device: torch.device) -> None:
    run_kinds(device, 3)


@pytest.mark.slow
def test_forty_kinds_of_rules_compile_forty_times(device: torch.device) -> None:
    run_kinds(device, 40)


@pytest.mark.gpu
def test_forty_kinds_of_rules_compile_forty_times_on_a_gpu(device: torch.device) -> None:
    run_kinds(device, 40)


WINDOW = 0  # a notebook's parameter is a global


def _closure(w: int) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < w)


def _global(w: int) -> Callable[..., Tensor]:
    global WINDOW
    WINDOW = w
    return lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW)


def _default(w: int) -> Callable[..., Tensor]:
    return lambda b, h, q, kv, w=w: (q >= kv) & (q - kv < w)


WAYS: dict[str, Callable[[int], Any]] = {
    "field": SlidingWindow,
    "closure": _closure,
    "global": _global,
    "default": _default,
}


def sweep(device: torch.device, way: str) -> None:
    q, k, v = qkv(device)
    before = int(compiles)
    for size in range(1, 51):
        out = fs.attention(q, k, v, rule=WAYS[way](size), backend="flex")
        expected = fs.reference(q, k, v, rule=SlidingWindow(size)).out
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    made = compiles.kinds[before:]
    judges = [kind for kind in made if kind.startswith("judge/")]
    # Where tiles are found on a device, a kind built so often has a kernel for that as well.
    assert len(made) - len(judges) <= 1 and len(judges) <= 1


@pytest.mark.parametrize("way", WAYS)
def test_fifty_values_of_a_parameter_compile_once(way: str, device: torch.device) -> None:
    """Wherever the number stands: the same code, so in this process one kernel for all four."""
    sweep(device, way)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_fifty_values_of_a_parameter_compile_once_on_a_gpu(way: str, device: torch.device) -> None:
    sweep(device, way)


def compiled_module(device: torch.device, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(device))
    selector = Quest(block=8, keep=4, q_block=4)
    slopes = torch.rand(6, device=device, requires_grad=True)
    rule, score = Causal(), Alibi(slopes)
    plan = fs.make_plan(q.requires_grad_(), k, v, rule=rule, select=selector, score=score)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        chosen = selector.select(q, k, plan.grid, plan.rule)
        return plan.run(q, k, v, plan.layout(chosen)).out * 2, chosen.indices

    compiled, indices = torch.compile(whole, fullgraph=True)(q, k, v)
    # Scores that all but tie may be ranked otherwise where sums are fused: hardly any are.
    eager = selector.select(q, k, plan.grid, plan.rule)
    assert (indices != eager.indices).any(-1).float().mean() < 0.02
    chosen = fs.Selection.from_indices(
        indices, kv_len=eager.kv_len, q_len=eager.q_len, kv_block=8, q_block=4
    )
    wanted_out = plan.run(q, k, v, plan.layout(chosen)).out * 2
    torch.testing.assert_close(compiled, wanted_out, atol=2e-3, rtol=2e-3)
    flow = torch.randn_like(compiled)
    got = torch.autograd.grad(compiled, (q, slopes), flow)
    wanted = torch.autograd.grad(wanted_out, (q, slopes), flow)
    torch.testing.assert_close(got[0], wanted[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got[1], wanted[1], atol=0.5, rtol=2e-2)


def test_selector_layout_and_attention_compile_into_one_graph(device: torch.device) -> None:
    compiled_module(device, torch.float32)


@pytest.mark.gpu
def test_selector_layout_and_attention_compile_into_one_graph_on_a_gpu(
    device: torch.device,
) -> None:
    compiled_module(device, torch.float32)


def test_attention_compiles_into_user_code(device: torch.device) -> None:
    q, k, v = qkv(device)
    rule = Causal()
    compiled = torch.compile(lambda q, k, v: fs.attention(q, k, v, rule=rule), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), fs.attention(q, k, v, rule=rule))


@pytest.mark.parametrize("backend", ["tiles", "gather"])
def test_one_compiled_function_takes_plans_of_many_blocks(
    backend: BackendName, device: torch.device
) -> None:
    """From the second on, torch takes the sizes of blocks for numbers that vary."""
    held: dict[str, Any] = {}

    @torch.compile(backend="eager", fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan: fs.Plan = held["plan"]
        return plan.run(q, k, v, plan.layout(held["select"])).out

    for q_block, kv_block, length in ((16, 16, 65), (32, 16, 65), (7, 5, 65)):
        tensors = qkv(device, length)
        blocks = -(-length // kv_block)
        ids = torch.arange(-(-length // q_block))[:, None] * 3 + torch.arange(3)
        held["select"] = fs.Selection.from_indices(
            (ids % blocks)[None, None].to(device),
            kv_len=length, q_len=length, q_block=q_block, kv_block=kv_block,
        )  # fmt: skip
        options = {"rule": Causal(), "select": held["select"]}
        held["plan"] = fs.make_plan(*tensors, **options, backend=backend)
        true = fs.reference(*tensors, **options).out
        torch.testing.assert_close(run(*tensors).double(), true, atol=1e-5, rtol=1e-5)


CAUSAL = Causal()
VARYING: dict[str, tuple[Callable[[int], dict[str, Any]], tuple[int, ...]]] = {
    "kv_block": (lambda n: {"select": chosen(kv_block=n)}, (4, 8, 16, 3)),
    "q_block": (lambda n: {"select": chosen(q_block=n)}, (4, 8, 16, 3)),
    "fallback": (lambda n: {"select": chosen(), "fallback": ("local", n)}, (2, 3, 5)),
    "scale": (lambda n: {"scale": n / 4}, (1, 2, 3, 5)),
    "tile": (lambda n: {"tile": n}, (16, 32, 48, 17)),
    "q_offset": (lambda n: {"q_offset": n}, (0, 5, -7, 9)),
    "split": (lambda n: {"tile": 16, "split": n}, (1, 2, 3)),
}


def chosen(kv_block: int = 1, q_block: int = 1) -> fs.Selection:
    ids = torch.arange(3).expand(1, 1, -(-64 // q_block), 3) % -(-64 // kv_block)
    return fs.Selection.from_indices(
        ids, kv_len=64, q_len=64, kv_block=kv_block, q_block=q_block, out_of_range="drop"
    )


@torch._dynamo.config.patch(recompile_limit=64)  # type: ignore[attr-defined]
def test_one_compiled_function_takes_selections_of_many_blocks() -> None:
    tensors = qkv(torch.device("cpu"), 64)

    @torch.compile(backend="eager", fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor, select: fs.Selection) -> Tensor:
        out = fs.attention(q, k, v, rule=CAUSAL, select=select)
        assert isinstance(out, Tensor)
        return out

    for kv_block, q_block in ((4, 1), (8, 1), (8, 16), (3, 5)):
        select = chosen(kv_block, q_block)
        true = fs.reference(*tensors, rule=CAUSAL, select=select).out
        torch.testing.assert_close(run(*tensors, select).double(), true, atol=1e-5, rtol=1e-5)


@torch._dynamo.config.patch(recompile_limit=64)  # type: ignore[attr-defined]
@pytest.mark.parametrize("name", VARYING)
def test_numbers_that_vary_in_one_compiled_function(name: str) -> None:
    """From the second value on, torch takes them for unknown."""
    options, values = VARYING[name]
    rule = Causal() & SlidingWindow(20)
    tensors = qkv(torch.device("cpu"), 64)
    fs.attention(*tensors, rule=rule)

    @torch.compile(backend="eager", fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        out = fs.attention(q, k, v, rule=rule, **options(n))
        assert isinstance(out, Tensor)
        return out

    for n in values:
        true = fs.reference(
            *tensors,
            rule=rule,
            **{k: x for k, x in options(n).items() if k not in ("tile", "split")},
        )
        torch.testing.assert_close(run(*tensors, n).double(), true.out, atol=1e-5, rtol=1e-5)


def test_a_compiled_call_needs_no_call_before_it(device: torch.device) -> None:
    q, k, v = qkv(device)
    indices = torch.randint(-1, q.shape[2] + 4, (1, q.shape[2], 9), device=device)
    # Code that nothing else in this process has.
    rule = fs.MaskRule.of(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 7 != 5) & (kv != 61))
    score = fs.ScoreRule.of(lambda score, b, h, q, kv: score - (q - kv) / 61)

    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        chosen = fs.adapters.dsa(indices, kv_len=k.shape[2], out_of_range="drop")
        return fs.attention(q, k, v, rule=rule, score=score, select=chosen, backend="tiles")

    compiled = torch.compile(step, fullgraph=True, backend="eager")(q, k, v, indices)
    torch.testing.assert_close(compiled, step(q, k, v, indices))


def test_a_pickled_plan_runs_where_its_rule_was_never_made(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(device)
    plan = fs.make_plan(q, k, v, rule=Causal(), backend="tiles")
    wanted, stored = plan.run(q, k, v).out, pickle.dumps(plan)
    monkeypatch.setattr(tracing, "_codes", {})
    mask_of.cache_clear()
    with pytest.raises(fs.FlexSparseError, match="unknown in this process: make the rule here"):
        plan.run(q, k, v)
    torch.testing.assert_close(pickle.loads(stored).run(q, k, v).out, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("pack", ["identity", "fold", "pack"])
@pytest.mark.parametrize("q_offset", [None, 3, torch.tensor([3, 5])])
def test_a_program_is_its_key(pack: Pack, q_offset: Any) -> None:
    q, k, v = qkv(torch.device("cpu"))
    chosen = Quest(block=8, keep=4, q_block=4)
    for rule, select in ((None, None), (Causal(), chosen), (None, chosen)):
        plan = fs.make_plan(
            q, k, v, rule=rule, select=select, score=Softcap(5.0), q_offset=q_offset, pack=pack,
            fallback="self" if select else None,
        )  # fmt: skip
        found, score = mask_of(plan.program.key), score_of(plan.score_program.key)
        for made, again in ((plan.program, found), (plan.score_program, score)):
            assert made.key == again.key
            assert (made.address, made.offset) == (again.address, again.offset)
        assert (found.member, found.reach) == (plan.program.member, plan.program.reach)


def test_a_plan_exports(device: torch.device) -> None:
    q, k, v = qkv(device)
    plan = fs.make_plan(q, k, v, rule=Causal())

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.run(q, k, v).out

    exported = torch.export.export(Module(), (q, k, v))
    torch.testing.assert_close(exported.module()(q, k, v), plan.run(q, k, v).out)


def test_bad_ids_cannot_be_judged_inside_a_compiled_region(device: torch.device) -> None:
    def convert(indices: Tensor) -> Tensor:
        return fs.Selection.from_indices(indices, kv_len=8, q_len=2).indices

    with pytest.raises(Exception, match="out_of_range='drop'"):
        torch.compile(convert, fullgraph=True)(torch.zeros(1, 1, 2, 3, dtype=torch.int32))
