"""What one call leaves behind for the next: nothing, unless the same objects come again unchanged."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.backends import flex
from flexsparse.device import compiles
from flexsparse.masks import Alibi, Causal, Document, RightPadding, SlidingWindow, Softcap
from flexsparse.selectors import Quest, Random

LENGTH = 48
TILE = 16
HEADS, KV_HEADS, DIM = 2, 1, 8


def qkv(batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, HEADS, LENGTH, DIM, generator=draw)
    k, v = (torch.randn(batch, KV_HEADS, LENGTH, DIM, generator=draw) for _ in range(2))
    return q, k, v


Q, K, V = qkv()


def attend(**options: Any) -> Tensor:
    return fs.attention(Q, K, V, tile=TILE, **options)


def truth(**options: Any) -> Tensor:
    return fs.reference(Q, K, V, **options).out.float()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


def candidates(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-1, LENGTH, (2, HEADS, LENGTH, 5), generator=draw)


def selection(indices: Tensor) -> fs.Selection:
    return fs.Selection.from_indices(indices, kv_len=LENGTH, q_len=LENGTH)


# Failed calls


def branches(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 0 if q_idx >= kv_idx else kv_idx < 4


def failures(**backend: Any) -> list[Callable[[], Any]]:
    wrong = selection(candidates(0))
    return [
        lambda: attend(rule=branches, **backend),
        lambda: attend(rule=lambda b, h, q, kv: q - kv, **backend),
        lambda: attend(rule=Document(torch.zeros(3, dtype=torch.int64)), **backend),
        lambda: attend(rule=lambda b, h, q, kv: b < 0, empty="error", **backend),
        lambda: attend(scale=float("nan"), **backend),
        lambda: attend(select=torch.zeros(1, 1, LENGTH, 1), **backend),
        lambda: fs.attention(Q[:1], K[:1], V[:1], select=wrong, **backend),
        lambda: fs.attention(Q, K[:, [0] * 3], V[:, [0] * 3], rule=Causal(), **backend),
        lambda: fs.attention(Q[..., :4], K, V, rule=Causal(), **backend),
        lambda: fs.attention(Q, K.double(), V, rule=Causal(), **backend),
    ]


def test_a_failed_call_changes_no_later_one() -> None:
    rule, select = Causal() & ~SlidingWindow(3), selection(candidates(1))
    options = {"rule": rule, "select": select, "score": Softcap(3.0), "fallback": "self"}
    plan = fs.make_plan(Q, K, V, tile=TILE, **options)
    first, held = attend(**options), plan.run(Q, K, V).out
    for failure in failures():
        with pytest.raises(fs.FlexSparseError):
            failure()
        assert torch.equal(attend(**options), first)
        assert torch.equal(plan.run(Q, K, V).out, held)
    assert close(first, truth(**options))


def test_a_plan_that_refused_a_run_still_runs() -> None:
    plan = fs.make_plan(Q, K, V, rule=Causal(), tile=TILE)
    other = fs.make_plan(Q, K, V, rule=SlidingWindow(4), tile=TILE)
    before = plan.run(Q, K, V).out
    for wrong in (
        lambda: plan.run(Q[:1], K[:1], V[:1]),
        lambda: plan.run(Q.double(), K.double(), V.double()),
        lambda: plan.run(Q, K, V, other.first),
        lambda: plan.layout(selection(candidates(0))),
    ):
        with pytest.raises(fs.FlexSparseError):
            wrong()
        assert torch.equal(plan.run(Q, K, V).out, before)


def test_a_failed_call_of_flex_changes_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = SlidingWindow(9)
    options = {"rule": rule, "backend": "flex"}
    first = attend(**options)
    compiled = int(compiles)
    assert close(first, truth(rule=rule))
    for failure in failures(backend="flex"):
        with pytest.raises(fs.FlexSparseError):
            failure()
        assert torch.equal(attend(**options), first)
    assert int(compiles) == compiled

    # What fails inside the compiled region itself, where torch would go on eager.
    def body(*args: Any) -> Callable[..., Any]:
        def fails(*call: Any) -> Any:
            raise ValueError("inside")

        return fails

    with monkeypatch.context() as patch:
        patch.setattr(flex, "_body", body)
        for _ in range(2):
            with pytest.raises(fs.FlexSparseError, match="rule SlidingWindow"):
                attend(rule=SlidingWindow(9), backend="flex", scale=0.5)
    kept = int(compiles)
    assert torch.equal(attend(**options), first)
    assert torch.equal(attend(rule=SlidingWindow(9), backend="flex"), first)
    assert int(compiles) == kept
    # The call that failed is right once it can be.
    scaled = attend(rule=rule, backend="flex", scale=0.5)
    assert close(scaled, truth(rule=rule, scale=0.5))


# torch's settings


def settings() -> dict[str, object]:
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    found: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "threads": torch.get_num_threads(),
        "warn always": torch.is_warn_always_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "python random": random.getstate(),
        "recursion": sys.getrecursionlimit(),
        "hooks": (sys.excepthook, sys.displayhook),
    }
    for config in (torch._dynamo.config, torch._inductor.config, torch._functorch.config):
        values = config.get_config_copy()
        found |= {f"{config.__name__}.{name}": repr(value) for name, value in values.items()}
    return found


@contextmanager
def unchanged() -> Iterator[None]:
    before = settings()
    yield
    after = settings()
    assert {n for n in before if before[n] != after[n]} == set()


def test_no_setting_of_torch_is_changed_by_calls() -> None:
    slopes = torch.ones(HEADS, requires_grad=True)
    q = Q.clone().requires_grad_()
    with unchanged():
        rule = Causal() & Document(torch.zeros(LENGTH, dtype=torch.int64))
        fs.attention(
            q, K, V, rule=rule, score=Alibi(slopes), select=Quest(block=8)
        ).sum().backward()
        attend(select=Random(block=8, keep=2), fallback=("local", 3), sink=torch.zeros(HEADS))
        fs.make_plan(Q, K, V, rule=rule).run(Q, K, V, return_lse=True)
        layout = fs.build_layout(
            rule=rule, grid=fs.Grid(LENGTH, LENGTH, batch=2), heads=(HEADS, KV_HEADS)
        )
        layout.budget(), layout.block_mask, fs.picture(rule, 8)
        assert fs.check(Q, K, V, rule=rule, rows=5, grads=True).ok
        fs.merge([fs.reference(Q, K, V), fs.reference(Q, K, V)])


def test_no_setting_of_torch_is_changed_by_a_failed_call() -> None:
    with unchanged():
        for failure in failures():
            with pytest.raises(fs.FlexSparseError):
                failure()


def test_no_setting_of_torch_is_changed_by_flex() -> None:
    with unchanged():
        attend(rule=SlidingWindow(9), backend="flex")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_left_as_it_was(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype), unchanged():
        assert attend(rule=Causal()).dtype == dtype


def test_deterministic_algorithms_are_used_and_left_on() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        q = Q.clone().requires_grad_()
        with unchanged():
            select = selection(candidates(2))
            out = fs.attention(q, K, V, select=select, fallback="self", sanitize=True)
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


# Import


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = (
    "triton", "matplotlib", "transformers", "pydantic", "typer", "rich", "yaml", "jinja2",
    "safetensors", "torch._dynamo", "torch._inductor", "sympy", "hypothesis", "pytest",
)  # fmt: skip


def test_import_is_light() -> None:
    code = f"""
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import flexsparse, flexsparse.masks, flexsparse.selectors
seconds = time.perf_counter() - start
new = set(sys.modules) - before
print(round(seconds, 3), sorted(m for m in {HEAVY!r} if m in new))
"""
    assert fresh(code).strip().endswith("[]"), fresh(code)


def test_import_changes_no_setting_of_torch() -> None:
    code = """
import sys, warnings, torch, torch._dynamo, torch._functorch.config, torch._inductor.config
def settings():
    configs = torch._dynamo.config, torch._inductor.config, torch._functorch.config
    return (
        torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        torch.backends.cuda.matmul.allow_tf32, torch.random.get_rng_state().tolist(),
        list(warnings.filters), sys.excepthook, sys.getrecursionlimit(),
        [repr(c.get_config_copy()) for c in configs],
    )
before = settings()
import flexsparse, flexsparse.masks, flexsparse.selectors
print(before == settings())
"""
    assert fresh(code).strip() == "True"


def test_import_prints_and_warns_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error:::flexsparse", "-c", "import flexsparse, flexsparse.masks"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == done.stderr == ""


# A change is seen


@dataclass(frozen=True, eq=False)
class Table(fs.MaskRule):
    """Keys whose flag is set: all, none or some of a tile, as the flags say."""

    seen: Any

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.seen[kv_idx]


def flags(seed: int) -> Tensor:
    """Whole tiles of keys seen or hidden, and one tile that is cut."""
    draw = random.Random(seed)
    seen = torch.tensor([draw.random() < 0.5 for _ in range(LENGTH // TILE)])
    seen = seen.repeat_interleave(TILE)
    seen[draw.randrange(LENGTH) :] ^= True
    return seen


def follow(options: dict[str, Any], changes: list[Callable[[], None]]) -> None:
    """Every call after every change gives what the reference gives then; twice, so that plans recur."""
    for change in (lambda: None, *changes):
        change()
        outs = [attend(**options) for _ in range(2)]
        expected = truth(**options)
        for out in outs:
            assert close(out, expected)


def test_an_in_place_change_of_a_table_is_seen() -> None:
    seen = flags(0)
    changes = [lambda i=i: seen.copy_(flags(i)) for i in range(1, 6)]
    follow({"rule": Table(seen)}, changes)
    follow({"rule": lambda b, h, q, kv: seen[kv]}, changes)
    follow({"rule": Causal() | Table(seen)}, changes)
    follow({"rule": lambda b, h, q, kv, own=seen: own[kv]}, changes)


def test_an_in_place_change_of_a_view_or_its_base_is_seen() -> None:
    both = torch.stack([flags(0), flags(1)])
    rule = Table(both[1])
    follow({"rule": rule}, [lambda: both.copy_(torch.stack([flags(2), flags(3)]))])
    follow({"rule": lambda b, h, q, kv: both[0][kv]}, [lambda: both[0].copy_(flags(4))])


def test_an_in_place_change_of_a_number_is_seen() -> None:
    width = torch.tensor(3)
    follow(
        {"rule": lambda b, h, q, kv: (q - kv).abs() < width},
        [lambda n=n: width.fill_(n) for n in (60, 1, 20)],
    )
    factor = torch.tensor(1.0)
    follow({"score": lambda s, b, h, q, kv: s * factor}, [lambda: factor.fill_(3.0)])


def test_a_learned_table_is_followed_through_training_steps() -> None:
    bias = torch.zeros(HEADS, requires_grad=True)
    optimizer = torch.optim.SGD([bias], lr=5.0)
    options = {"rule": Causal(), "score": lambda s, b, h, q, kv: s + bias[h] * kv}
    for _ in range(4):
        out, expected = attend(**options), truth(**options)
        assert close(out, expected)
        (grad,) = torch.autograd.grad((expected * V.repeat(1, HEADS, 1, 1)).sum(), bias)
        optimizer.zero_grad()
        (out * V.repeat(1, HEADS, 1, 1)).sum().backward()
        assert torch.allclose(bias.grad, grad, atol=1e-3, rtol=1e-3)
        optimizer.step()


def test_a_rebound_closure_variable_is_seen() -> None:
    width, seen = 3, flags(0)

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ((q_idx - kv_idx).abs() < width) | seen[kv_idx]

    def rebind(n: int) -> None:
        nonlocal width, seen
        width, seen = n, flags(n)

    follow({"rule": rule}, [lambda n=n: rebind(n) for n in (60, 1, 20, 2)])


def test_a_rebound_global_of_a_notebook_is_seen() -> None:
    cells: dict[str, Any] = {"torch": torch, "width": 3, "seen": flags(0)}
    exec("def rule(b, h, q, kv): return ((q - kv).abs() < width) | seen[kv]", cells)
    changes = [lambda n=n: cells.update(width=n, seen=flags(n)) for n in (60, 1, 20, 2)]
    follow({"rule": cells["rule"]}, changes)


def test_a_module_of_a_notebook_that_another_takes_the_place_of_is_seen() -> None:
    other = ModuleType("other")
    vars(other).update(maximum=torch.minimum)
    cells: dict[str, Any] = {"m": torch}
    exec("def rule(b, h, q, kv): return m.maximum(q - kv, kv - q) < 9", cells)
    rule = fs.MaskRule.of(cells["rule"])
    follow({"rule": rule}, [lambda m=m: cells.update(m=m) for m in (other, torch, other)])


def test_a_helper_written_anew_in_a_notebook_is_seen() -> None:
    cells: dict[str, Any] = {}
    exec("def rule(b, h, q, kv): return near((q - kv).abs())", cells)
    changes = [
        lambda n=n: exec(f"def near(d): return d < {n}", cells) for n in (3, 60, 1, 20, 3, 9)
    ]
    changes[0]()
    follow({"rule": cells["rule"]}, changes)


def test_a_rule_written_anew_in_a_notebook_is_seen() -> None:
    cells: dict[str, Any] = {}
    for n in (3, 60, 1, 20, 3, 9):
        exec(f"def rule(b, h, q, kv): return (q - kv).abs() < {n}", cells)
        follow({"rule": cells["rule"]}, [])


def test_a_changed_attribute_of_a_closed_over_object_is_seen() -> None:
    held = SimpleNamespace(width=3, tables=[flags(0)], named={"seen": flags(1)})

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = (q_idx - kv_idx).abs() < held.width
        return near | (held.tables[0][kv_idx] & held.named["seen"][kv_idx])

    follow(
        {"rule": rule},
        [
            lambda: vars(held).update(width=50),
            lambda: held.tables.__setitem__(0, flags(2)),
            lambda: held.tables[0].logical_not_(),
            lambda: held.named.update(seen=flags(3)),
        ],
    )


def test_an_in_place_change_of_an_offset_is_seen() -> None:
    offset = torch.tensor([0, 0])
    changes = [lambda n=n: offset.copy_(torch.tensor(n)) for n in ([-20, 5], [40, -48], [0, 1])]
    follow({"rule": Causal(), "q_offset": offset}, changes)


def test_an_in_place_change_of_candidates_is_seen() -> None:
    select = selection(candidates(0))

    def change(seed: int) -> None:
        fresh = selection(candidates(seed)).indices
        select.indices.fill_(-1)
        select.indices[..., : fresh.shape[-1]] = fresh[..., : select.indices.shape[-1]]

    follow({"select": select, "rule": Causal()}, [lambda n=n: change(n) for n in range(1, 5)])


def test_an_in_place_change_of_a_sink_is_seen() -> None:
    sink = torch.zeros(HEADS)
    follow({"sink": sink, "rule": Causal()}, [lambda: sink.fill_(5.0)])


def test_an_in_place_change_of_queries_reaches_a_selector() -> None:
    q = Q.clone()
    selector, rule = Quest(block=8, keep=2, q_block=8), Causal()
    for seed in range(4):
        q.copy_(qkv(seed=seed)[0])
        for _ in range(2):
            out = fs.attention(q, K, V, select=selector, rule=rule)
            select = selector.select(q, K, fs.Grid(LENGTH, LENGTH, batch=2), rule)
            assert close(out, fs.reference(q, K, V, select=select, rule=rule).out.float())


def random_call(draw: random.Random, kept: dict[str, Any]) -> dict[str, Any]:
    """The options of a call over objects that are kept, changed in place, replaced or dropped."""

    def renew(name: str, make: Callable[[int], Any], write: Callable[[Any, Any], Any]) -> Any:
        seed, how = draw.randrange(100), draw.random()
        if name not in kept or how < 0.3:
            kept[name] = make(seed)
        elif how < 0.6:
            write(kept[name], make(seed))
        return kept[name]

    seen = renew("seen", flags, lambda old, new: old.copy_(new))
    lengths = renew(
        "lengths",
        lambda seed: torch.tensor([seed % LENGTH, 3 * seed % LENGTH]),
        lambda old, new: old.copy_(new),
    )
    rules: list[Callable[[], Any]] = [
        lambda: None,
        lambda: Table(seen),
        lambda: Causal() & Table(seen),
        lambda: RightPadding(lengths),
        lambda: SlidingWindow(draw.choice([1, 5, 40])),
        lambda: lambda b, h, q, kv: seen[kv] | (kv < lengths[b]),
    ]
    if "rule" not in kept or draw.random() < 0.4:
        # The tensors of the kept rule may be replaced later: it then keeps those it was made with.
        kept["rule"] = draw.choice(rules)()
    options = {"rule": kept["rule"]}
    if draw.random() < 0.5:
        options["select"] = renew(
            "select",
            lambda seed: selection(candidates(seed)),
            lambda old, new: old.indices.copy_(
                torch.nn.functional.pad(new.indices, (0, 5), value=-1)[..., : old.indices.shape[-1]]
            ),
        )
        if draw.random() < 0.3:
            options["fallback"] = draw.choice(["self", ("local", 4)])
    if draw.random() < 0.5:
        options["q_offset"] = renew(
            "q_offset",
            lambda seed: torch.tensor([seed % 30 - 15, seed % 7]),
            lambda old, new: old.copy_(new),
        )
    if draw.random() < 0.3:
        options["scale"] = draw.choice([0.1, 1.0])
    if draw.random() < 0.3:
        options["sink"] = renew(
            "sink", lambda seed: torch.full((HEADS,), seed / 50), lambda old, new: old.copy_(new)
        )
    if draw.random() < 0.1:
        kept.pop(draw.choice(list(kept)))
        gc.collect()
    return options


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_of_an_earlier_call_is_never_stale(seed: int) -> None:
    draw = random.Random(seed)
    kept: dict[str, Any] = {}
    for _ in range(40):
        options = random_call(draw, kept)
        for _ in range(draw.choice([1, 2])):
            out = attend(**options)
        assert close(out, truth(**options)), options


def test_new_tensors_at_addresses_used_before() -> None:
    """Objects die between calls, and new ones take their places in memory."""
    for seed in range(30):
        seen = flags(seed)
        rule = Table(seen)
        options = {"rule": rule, "q_offset": torch.tensor([seed % 9, 0])}
        expected = truth(**options)
        assert close(attend(**options), expected)
        del seen, rule, options
        if seed % 10 == 0:
            gc.collect()


def test_a_rebound_table_at_an_address_used_before() -> None:
    cells: dict[str, Any] = {}
    exec("def rule(b, h, q, kv): return seen[kv]", cells)
    for seed in range(30):
        cells["seen"] = None
        cells["seen"] = flags(seed)
        assert close(attend(rule=cells["rule"]), truth(rule=cells["rule"]))


def test_gradients_and_no_gradients_take_turns() -> None:
    rule, slopes = Causal(), torch.ones(HEADS, requires_grad=True)
    score = Alibi(slopes)
    q = Q.clone().requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            assert not fs.attention(q, K, V, rule=rule, score=score).requires_grad
        with torch.inference_mode():
            assert fs.attention(q, K, V, rule=rule, score=score).is_inference()
        out = fs.attention(q, K, V, rule=rule, score=score)
        dq, dslopes = torch.autograd.grad(out.sum(), [q, slopes])
        assert dq.isfinite().all()
        assert dslopes.isfinite().all()


def test_lengths_and_dtypes_take_turns() -> None:
    rule = Causal()
    for _ in range(2):
        for length in (1, 17, LENGTH):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                q, k, v = (x[:, :, :length].to(dtype) for x in (Q, K, V))
                out = fs.attention(q, k, v, rule=rule, tile=TILE)
                assert out.dtype == dtype
                expected = fs.reference(q, k, v, rule=rule).out
                loose = 2e-2 if dtype == torch.bfloat16 else 1e-5
                assert torch.allclose(out.double(), expected, atol=loose)


def test_lse_and_no_lse_take_turns() -> None:
    rule = Causal()
    for _ in range(3):
        assert isinstance(attend(rule=rule), Tensor)
        out, lse = attend(rule=rule, return_lse=True)
        assert torch.equal(out, attend(rule=rule))
        assert lse.dtype == torch.float32


# Threads


def test_threads_with_rules_of_their_own() -> None:
    rules = [SlidingWindow(n) for n in range(1, 25)] + [Table(flags(n)) for n in range(6)]
    expected = [truth(rule=rule) for rule in rules]
    wrong: list[object] = []

    def work(first: int) -> None:
        for i in range(40):
            n = (first + 7 * i) % len(rules)
            try:
                if not close(attend(rule=rules[n]), expected[n]):
                    wrong.append(n)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_threads_that_make_rules_and_fail_at_it() -> None:
    wrong: list[object] = []

    def work(n: int) -> None:
        for _ in range(15):
            try:
                fs.MaskRule.of(branches)
                wrong.append("accepted")
            except fs.FlexSparseError:
                pass
            rule = fs.MaskRule.of(lambda b, h, q, kv, n=n: (q - kv).abs() < n)
            if not close(attend(rule=rule), truth(rule=rule)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_gradients_in_two_threads() -> None:
    wrong: list[object] = []

    def work(width: int) -> None:
        q = Q.clone().requires_grad_()
        rule = SlidingWindow(width)
        expected = torch.autograd.grad(fs.reference(q, K, V, rule=rule).out.sum(), q)[0]
        for _ in range(8):
            grad = torch.autograd.grad(fs.attention(q, K, V, rule=rule, tile=TILE).sum(), q)[0]
            if not torch.allclose(grad, expected.float(), atol=1e-5):
                wrong.append(width)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
