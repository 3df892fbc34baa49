"""A run like one before skips what was judged then, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flexsparse as fs
from flexsparse import plan as plans
from flexsparse.backends import flex, routes
from flexsparse.errors import ArgumentError, LayoutError, ShapeError
from flexsparse.masks import Causal, Document
from flexsparse.plan import Plan

LENGTH = 192


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are remembered as on a device; they are torch's own FlexAttention, eager."""

    def entered(kind: Any, call: Any, make: Callable[[], Any], *rest: Any, **known: Any) -> Any:
        kernel = make()
        return kernel(*call), kernel

    monkeypatch.setattr(flex, "entered", entered)
    monkeypatch.setattr(flex, "refuses", lambda call: None)
    monkeypatch.setattr(routes, "remembers", lambda work: not torch.compiler.is_compiling())
    with torch.no_grad():
        yield


def qkv(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, LENGTH, 16, generator=draw) for h in (4, 2, 2))
    return q, k, v


def selection(seed: int = 0) -> fs.Selection:
    # Single keys: eager FlexAttention reads no lists, so that membership must be asked.
    indices = torch.randint(
        0, LENGTH, (2, 2, LENGTH, 40), generator=torch.Generator().manual_seed(seed)
    )
    return fs.Selection.from_indices(indices, kv_len=LENGTH, q_len=LENGTH)


def repeats(plan: Plan, *given: Any) -> bool:
    return plans.again(plan, *given) is not None


@pytest.mark.parametrize("pack", ["identity", "fold", "pack"])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_it_gives_what_the_first_gave(pack: Any, selected: bool, lse: bool) -> None:
    select = selection() if selected else None
    plan = fs.make_plan(*qkv(), rule=Causal(), select=select, backend="flex", pack=pack)
    plan.run(*qkv(), return_lse=lse)
    for seed in (1, 2):
        layout = plan.layout(selection(seed) if selected else None)
        assert repeats(plan, *qkv(seed), layout, lse)
        got = plan.run(*qkv(seed), layout, return_lse=lse)
        select = layout.select
        want = fs.reference(*qkv(seed), rule=Causal(), select=select)
        torch.testing.assert_close(got.out, want[0], check_dtype=False, rtol=1e-4, atol=1e-5)
        assert got.layout is layout and got.plan is plan and (got.lse is not None) == lse
        if got.lse is not None:
            torch.testing.assert_close(got.lse, want[1], check_dtype=False, rtol=1e-4, atol=1e-5)


def test_a_changed_tensor_of_the_rule_is_noticed() -> None:
    of = torch.arange(LENGTH).expand(2, -1) // 50
    rule = Document(of.clone())
    plan = fs.make_plan(*qkv(), rule=rule, backend="flex")
    first = plan.layout()
    plan.run(*qkv(), first)
    assert repeats(plan, *qkv(), first, False)
    rule.document_of.copy_(of // 2)
    with pytest.raises(LayoutError, match="has changed"):
        plan.run(*qkv(), first)
    with pytest.raises(LayoutError, match="has changed"):
        plan.run(*qkv())
    got = plan.run(*qkv(), plan.layout()).out
    want = fs.reference(*qkv(), rule=rule)[0]
    torch.testing.assert_close(got, want, check_dtype=False, rtol=1e-4, atol=1e-5)


def test_a_rule_of_inference_mode_finds_its_layout_anew() -> None:
    with torch.inference_mode():
        rule = Document(torch.zeros(2, LENGTH, dtype=torch.int64))
        plan = fs.make_plan(*qkv(), rule=rule, backend="flex")
        plan.run(*qkv())
        rule.document_of[:, 100:] = 1
        want = fs.reference(*qkv(), rule=rule)[0]
        torch.testing.assert_close(
            plan.run(*qkv()).out, want, check_dtype=False, rtol=1e-4, atol=1e-5
        )


def test_what_does_not_fit_is_refused_as_ever() -> None:
    plan = fs.make_plan(*qkv(), rule=Causal(), backend="flex")
    q, k, v = qkv()
    plan.run(q, k, v)
    assert repeats(plan, q, k, v, None, False)
    other = fs.make_plan(q[:, :, :64], k, v, rule=Causal(), backend="flex")
    with pytest.raises(ShapeError, match="was made for q"):
        plan.run(q[:, :, :64], k, v)
    with pytest.raises(ShapeError, match="q is"):
        plan.run(q, k.double(), v)
    with pytest.raises(ShapeError, match="k is sparse"):
        plan.run(q, k.to_sparse(), v)
    with pytest.raises(ArgumentError, match="k must be a tensor"):
        plan.run(q, None, v)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="return_lse"):
        plan.run(q, k, v, return_lse=0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="layout must be a Layout"):
        plan.run(q, k, v, "layout")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="does not belong"):
        plan.run(q, k, v, other.first)
    with pytest.raises(ArgumentError, match=r"torch\.func"):
        torch.func.vmap(lambda x: plan.run(x, k, v).out)(q[None])


def test_a_layout_must_hold_what_the_plan_asks_for() -> None:
    sanitizing = fs.make_plan(*qkv(), rule=Causal(), backend="flex", sanitize=True)
    strict = fs.make_plan(*qkv(), rule=Causal(), backend="flex", empty="error")
    plain = fs.make_plan(*qkv(), rule=Causal(), backend="flex")
    for plan in (sanitizing, strict, plain):
        plan.run(*qkv())
    assert not repeats(sanitizing, *qkv(), None, False)
    assert plain.first is not None
    for plan in (sanitizing, strict):
        with pytest.raises(LayoutError, match="does not belong"):
            plan.run(*qkv(), plain.first)


@pytest.mark.parametrize("what", ["strides", "gradients", "autocast", "subclass", "sink", "score"])
def test_another_form_is_judged(what: str) -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {}
    if what == "sink":
        options["sink"] = torch.zeros(4)
    if what == "score":
        options["score"] = lambda s, b, h, q_idx, kv_idx: s * 0.5
    plan = fs.make_plan(q, k, v, rule=Causal(), backend="flex", pack="identity", **options)
    plan.run(q, k, v)
    plan.run(q, k, v)
    if what == "strides":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    if what == "gradients":
        k = k.requires_grad_()
    if what == "subclass":
        k = torch.nn.Parameter(k, requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        assert not repeats(plan, q, k, v, None, False)


@pytest.mark.parametrize("what", ["kv_indices", "tables"])
def test_a_layout_that_lies_otherwise_in_memory_is_of_another_form(what: str) -> None:
    q, k, v = qkv()
    rule = Document(torch.arange(LENGTH) // 50)
    plan = fs.make_plan(q, k, v, rule=rule, select=selection(), backend="flex")
    layout = plan.layout(selection())

    def otherwise(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)[..., 0]

    of = getattr(layout, what)
    changed = [*map(otherwise, of)] if what == "tables" else otherwise(of)
    other = dataclasses.replace(layout, **{what: changed})
    assert other.form != layout.form
    plan.run(q, k, v, layout)
    assert repeats(plan, q, k, v, layout, False) and not repeats(plan, q, k, v, other, False)


def test_a_view_of_the_opposite_is_not_taken_for_what_its_memory_holds() -> None:
    q, k, v = qkv()
    opposite = torch.complex(k, -k).conj().imag
    twin = torch.complex(k, k).imag
    assert opposite.is_neg() and opposite.stride() == twin.stride()
    plan = fs.make_plan(q, twin, v, rule=Causal(), backend="flex", pack="identity")
    for given in (twin, opposite, twin, opposite):
        assert not (given is opposite and repeats(plan, q, given, v, None, False))
        want = fs.reference(q, given, v, rule=Causal())[0]
        got = plan.run(q, given, v).out
        torch.testing.assert_close(got, want, check_dtype=False, rtol=1e-4, atol=1e-5)


def test_plans_keep_few_forms_and_are_let_go() -> None:
    import gc
    import weakref

    from flexsparse.repeats import _MOST_FORMS, _repeats

    plan = fs.make_plan(*qkv(), rule=Causal(), backend="flex", pack="identity")
    for step in range(_MOST_FORMS + 4):
        q, k, v = qkv()
        room = torch.zeros(2, 2, LENGTH, 16 + step)
        plan.run(q, room[..., :16].copy_(k), v)
    assert len(_repeats[plan].runs) == _MOST_FORMS
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_tangents_are_never_dropped() -> None:
    tensors = qkv()
    plan = fs.make_plan(*tensors, rule=Causal(), backend="flex")
    for _ in range(2):
        plan.run(*tensors)
    with forward_ad.dual_level():
        plan.run(*tensors)
        for at in range(3):
            given = [forward_ad.make_dual(x, x) if i == at else x for i, x in enumerate(tensors)]
            with pytest.raises(ArgumentError, match="no forward-mode derivative"):
                plan.run(*given)
            with pytest.raises(ArgumentError, match="no forward-mode derivative"):
                fs.attention(*given, rule=Causal(), backend="dense")
    assert repeats(plan, *tensors, plan.layout(), False)


@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_a_copy_of_a_layout_that_ran_is_written_anew(way: str) -> None:
    plan = fs.make_plan(*qkv(), rule=Causal(), select=selection(), backend="flex")
    layout = plan.layout(selection(5))
    for _ in range(2):
        plan.run(*qkv(), layout)
    ways: dict[str, Callable[[Any], Any]] = {
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "copy": lambda x: (x[0], copy.copy(x[1])),
        "deepcopy": copy.deepcopy,
    }
    other, copied = ways[way]((plan, layout))
    other.layout(selection(7), into=copied)
    want = fs.reference(*qkv(1), rule=Causal(), select=selection(7))
    for _ in range(3):
        got = other.run(*qkv(1), copied)
        torch.testing.assert_close(got.out.double(), want.out, rtol=1e-4, atol=1e-5)
