"""The front door."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from flexsparse.arguments import Empty, Fallback
from flexsparse.choice import BackendName, Pack
from flexsparse.device import autocast_dtype
from flexsparse.given import Given
from flexsparse.layout import Layout
from flexsparse.parameters import held, is_number
from flexsparse.plan import Plan
from flexsparse.planning import Choices, make_plan
from flexsparse.result import Result
from flexsparse.rules import MaskMod, MaskRule, as_rule, trace_rule
from flexsparse.scores import ScoreMod, as_score, trace_score
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector
from flexsparse.settling import settled
from flexsparse.watching import watch


class Options(Choices, total=False):
    """Every keyword of `attention` but ``return_lse``."""

    rule: MaskMod | None
    select: Selection | Selector | None
    score: ScoreMod | None
    scale: float | None
    q_offset: int | Tensor | None
    sink: Tensor | None
    fallback: Fallback


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
def attention(
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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the pairs that rule and selection both allow.

    ``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]``, ``v [B, Hkv, S, Dv]`` -> out ``[B, Hq, Q, Dv]``, and with
    ``return_lse`` also lse ``[B, Hq, Q]`` (natural log, fp32). A query that sees nothing gives 0 and
    -inf; ``fallback="self"`` or ``("local", n)`` gives it its own key or the last ``n`` up to its own,
    as far as the rule lets it, where the selection left it none, and ``empty="error"`` refuses it.
    ``q_offset`` (an int, or an int tensor ``[B]``) is the position of the first query among the keys,
    by default such that the last query stands at the last key. The plan of the last call with the same rule object, unchanged, is used again; to decide
    once and run often, hold a plan of `make_plan`.

    ``score``: a ScoreRule or score_mod that changes scores. ``scale``: their factor, by default
    D ** -0.5. ``q_offset``: the position of the first query, an int or ``[B]``, by default
    S - Q. ``sink``: learned logits ``[Hq]`` in the denominator. ``fallback``: what a query that
    sees nothing gets, ``"self"`` or ``("local", n)``, within the rule; ``empty="error"`` refuses
    one that still sees nothing. ``sanitize``: keys that nobody sees may hold NaN. ``backend``,
    ``pack`` and ``tile`` override what would be chosen: heads lie as they are (``"identity"``), KV
    heads in the batch (``"fold"``), or moreover query heads beside their queries (``"pack"``), whose
    tiles then count rows of single heads. ``split=n`` cuts rows of more than n tiles, and for gradients
    columns of more, into pieces that other programs walk; False cuts none. ``cluster=True`` lays rows of
    candidates beside those alike, so that a tile visits fewer keys, False leaves them as they are.

    >>> import torch
    >>> from flexsparse.masks import Causal
    >>> q = k = torch.zeros(1, 1, 3, 16)
    >>> v = torch.arange(3.0).view(1, 1, 3, 1)
    >>> attention(q, k, v, rule=Causal()).flatten().tolist()
    [0.0, 0.5, 1.0]
    """
    options = {
        "rule": rule, "select": select, "score": score, "scale": scale, "q_offset": q_offset,
        "sink": sink, "fallback": fallback, "empty": empty, "sanitize": sanitize,
        "backend": backend, "pack": pack, "tile": tile, "split": split, "cluster": cluster,
    }  # fmt: skip
    result = attended(q, k, v, options, return_lse=return_lse)
    return result.out if result.lse is None else (result.out, result.lse)


def attended(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], *, return_lse: bool = False
) -> Result:
    """As `attention` with these keywords, ``rule`` and ``score`` among them; says what computed it."""
    plan, layout = _planned(q, k, v, options)
    return plan.run(q, k, v, layout, return_lse=return_lse)


# The plans of the last few calls, each with every object that its signature names: so an identity in a
# signature cannot come to mean another object while the plan is here.
_KEPT = 16
_lock = Lock()
_plans: OrderedDict[tuple[object, ...], tuple[Plan, list[Any]]] = OrderedDict()


def _planned(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Plan, Layout | None]:
    """The plan of an earlier call with the same objects, unchanged, or a new one."""
    if torch.compiler.is_compiling():
        plan = make_plan(q, k, v, **options)
        return plan, plan.first
    keep: list[Any] = []
    signature = _signature(q, k, v, options, keep)
    with _lock:
        known = _plans.get(signature)
        if known is not None:
            _plans.move_to_end(signature)
    if known is None:
        plan = make_plan(q, k, v, **options)
        with _lock:
            _plans[signature] = plan, keep
            if len(_plans) > _KEPT:
                _plans.popitem(last=False)
        return plan, plan.first
    plan, _ = known
    if plan.selector is None:
        # The same values can be another change of the same tensors.
        stale = plan.first is not None and not plan.first.versions.current
        return plan, plan.layout(plan.first.select) if plan.first and stale else plan.first
    select = plan.selector.select(q, k, plan.grid, plan.rule)
    if not plan.takes(select):
        with _lock:
            _plans.pop(signature, None)
        return _planned(q, k, v, options)
    return plan, plan.layout(select)


def _signature(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], keep: list[Any]
) -> tuple[object, ...]:
    forms: list[object] = []
    for x in (q, k, v):
        if isinstance(x, Tensor) and not x.is_nested:
            forms.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad))
    mode: list[object] = [torch.is_grad_enabled()]
    if isinstance(q, Tensor):
        mode.append(autocast_dtype(q.device))
    parts = dict(options)
    rule, score = parts.pop("rule"), parts.pop("score")
    return (
        *forms,
        *mode,
        _seen(rule, as_rule, keep),
        _seen(score, as_score, keep),
        tuple([_value(part, keep) for part in parts.values()]),
    )


def _value(part: Any, keep: list[Any]) -> object:
    """A part of a call that is no mod; most are plain values."""
    if part is None or type(part) in (bool, int, float, str):
        return type(part), part
    if isinstance(part, Selection):
        # All of it but its candidates stays as it was made.
        keep.append(part)
        candidates = part.held
        given = isinstance(candidates, Given)
        return id(part), candidates._version if given else held(candidates, keep)
    return held(part, keep)


def _seen(mod: Any, judged: Callable[[Any], Any], keep: list[Any]) -> object:
    """What a mod amounts to: what it holds, where that says all, or else its trace."""
    if mod is None:
        return None
    if (known := watch(mod)) is not None:
        keep += known.keep
        return known.held
    if settled(mod):
        return held(mod, keep)
    rule = judged(mod)
    traced = trace_rule(rule) if isinstance(rule, MaskRule) else trace_score(rule)
    values = [held(t.item() if is_number(t) else t, keep) for t in traced.tensors]
    return (traced.kind, *values)
