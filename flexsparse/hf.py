"""A transformers language model whose attention is a rule and a selector.

    with flexsparse.hf.use(model, rule=SlidingWindow(512), select=Quest(block=64, keep=32)):
        model.generate(...)

Needs the extra ``flexsparse[hf]``; transformers is imported only when asked for. The seam is its
registry of attention functions: inside the block every layer's q, k and v, rotary embedding applied,
meet `flexsparse.attention`, and the model's own masks are not made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import Tensor

from flexsparse.arguments import Fallback
from flexsparse.attention import attended
from flexsparse.choice import BackendName, Pack
from flexsparse.errors import ArgumentError, BackendError
from flexsparse.masks.causal import Causal
from flexsparse.result import Result
from flexsparse.rules import MaskMod, as_rule
from flexsparse.scores import ScoreMod
from flexsparse.selection import Selection
from flexsparse.selectors.base import Selector
from flexsparse.selectors.h2o import H2O

Told = Callable[[int, Result], None]

# What a model may hand over beside q, k and v that changes what its attention computes.
_FOREIGN = (
    "softcap", "s_aux", "sliding_window", "position_bias", "indices", "block_indices",
    "cu_seq_lens_q",
)  # fmt: skip
_names = (f"flexsparse-{i}" for i in itertools.count())


@contextmanager
def use(
    model: Any,
    *,
    rule: MaskMod | None = None,
    select: Selector | Sequence[Selector | None] | None = None,
    score: ScoreMod | None = None,
    fallback: Fallback = None,
    backend: BackendName = "auto",
    pack: Pack | None = None,
    tile: int | tuple[int, int] | None = None,
    split: int | Literal[False] | None = None,
    cluster: bool | None = None,
    told: Told | None = None,
) -> Iterator[None]:
    """Inside the block, the attention of every layer is what rule and selector leave of causal attention.

    A query sees no later token, whatever the rule. ``select``: a selector for all layers, or one a
    layer, None for no selector, such as ``[reuse[i] for i in range(layers)]``. The other keywords are those of
    `flexsparse.attention`; the scale is the model's. ``told(layer, result)`` hears of each layer's
    call as it is made.

    Whole prompts, parts of them and single tokens, over no cache or one that grows (transformers'
    default): each call selects anew among all keys so far. Refused with what to do instead:
    padding, other masks than the causal one, caches of a fixed size, dropout, and models that change
    attention in their own way (soft caps, learned sinks, sliding layers, top-k indices).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise BackendError(
            "flexsparse.hf needs transformers: pip install 'flexsparse[hf]'"
        ) from None
    if not hasattr(model, "set_attn_implementation"):
        raise ArgumentError(f"model must be a transformers model, got {type(model).__name__}")
    causal, asked = Causal(), as_rule(rule)
    options: dict[str, Any] = {
        "rule": causal if asked is None else causal & asked,
        "score": score, "fallback": fallback, "backend": backend, "pack": pack, "tile": tile,
        "split": split, "cluster": cluster,
    }  # fmt: skip
    of_layer = _per_layer(select)

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        _judge_call(module, mask, given)
        selector = of_layer(module.layer_idx)
        if isinstance(selector, H2O) and q.shape[2] < k.shape[2]:
            raise ArgumentError(
                "H2O needs every query in order, but this call has only the last "
                f"{q.shape[2]} of {k.shape[2]}: run the whole sequence in one call, without a cache"
            )
        result = attended(q, k, v, {**options, "select": selector, "scale": given.get("scaling")})
        if told is not None:
            told(module.layer_idx, result)
        return result.out.transpose(1, 2).contiguous(), None

    name = next(_names)
    # Without a mask function of the same name there would be no word of padding.
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _judged_mask)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ArgumentError(
                f"{type(model).__name__} does not let its attention be replaced: its code does not "
                "go through transformers' AttentionInterface"
            )
        yield
    finally:
        model.set_attn_implementation(before)
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(name, None)


class _Judged(NamedTuple):
    """Stands where a mask would, with what is wrong with it: a model may make some that no layer uses."""

    fault: str | None


def _judged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> _Judged:
    """What transformers asks once a call, for each kind of layer, before the layers run."""
    from transformers.masking_utils import causal_mask_function

    if mask_function is not causal_mask_function:
        return _Judged(
            "has another mask than the plain causal one, and sliding, chunked, bidirectional or packed "
            "attention is not carried over: use a model without it, and write it as a rule"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        hidden = int((~attention_mask.bool()).sum())
        raise ArgumentError(
            f"attention_mask hides {hidden} padding tokens of {attention_mask.numel()}, which is not "
            "carried over: pass sequences of one length, or one at a time"
        )
    if isinstance(q_offset, Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise ArgumentError(
            f"the cache has {kv_length} places, not just the keys so far: use transformers' "
            "DynamicCache, or use_cache=False"
        )
    return _Judged(None)


def _judge_call(module: Any, mask: Any, given: dict[str, Any]) -> None:
    if isinstance(mask, _Judged) and mask.fault is not None:
        raise ArgumentError(f"layer {module.layer_idx} of {type(module).__name__} {mask.fault}")
    if not isinstance(mask, _Judged):
        kind = "no mask" if mask is None else f"a {type(mask).__name__}"
        raise ArgumentError(
            f"layer {module.layer_idx} was given {kind} in place of the causal mask, so who may see "
            "whom is not known: pass no 4-D attention_mask, and use a model that makes its masks by "
            "transformers' create_causal_mask"
        )
    if given.get("dropout"):
        raise ArgumentError(
            f"layer {module.layer_idx} asks for a dropout of {given['dropout']} in its attention, "
            "which no kernel here has: call model.eval(), or set attention_dropout to 0"
        )
    foreign = [name for name in _FOREIGN if given.get(name) is not None]
    if foreign:
        raise ArgumentError(
            f"layer {module.layer_idx} of {type(module).__name__} gives its attention "
            f"{foreign[0]}, which is not carried over: use a model without it"
        )


def _per_layer(select: object) -> Callable[[int], Selector | None]:
    if select is None or isinstance(select, Selector):
        return lambda layer: select
    if isinstance(select, Selection):
        raise ArgumentError(
            "select must be a Selector here: a Selection belongs to one call, and a model makes one a "
            "layer"
        )
    if not isinstance(select, Sequence) or not all(
        one is None or isinstance(one, Selector) for one in select
    ):
        raise ArgumentError(
            f"select must be a Selector, or a list with one (or None) a layer, got {select!r}"
        )

    def one(layer: int) -> Selector | None:
        if layer >= len(select):
            raise ArgumentError(
                f"select has {len(select)} selectors, one a layer, but the model has a layer {layer}"
            )
        found: Selector | None = select[layer]
        return found

    return one
