"""A language model's attention replaced: against the model's own, and against masks made by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import flexsparse as fs
from flexsparse import hf
from flexsparse.masks import AttentionSink, Causal, SlidingWindow, Softcap
from flexsparse.selectors import H2O, OracleTopK, Quest, Random, SnapKV
from flexsparse.selectors.reuse import Reuse

transformers = pytest.importorskip("transformers")

LAYERS, VOCABULARY = 3, 50


@pytest.fixture(scope="module")
def model() -> Any:
    """Random weights; six query heads over two KV heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=draw)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    found: torch.Tensor = model(ids, attention_mask=mask, use_cache=False).logits
    return found


def by_hand(model: Any, ids: torch.Tensor, rule: fs.MaskRule) -> torch.Tensor:
    """The model's own attention under a mask that is written out, pair by pair."""
    n = torch.arange(ids.shape[1])
    seen = torch.stack(
        [rule(torch.tensor(0), torch.tensor(0), i, n).expand(len(n)) & (n <= i) for i in n]
    )
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return logits(model, ids, mask.expand(ids.shape[0], 1, -1, -1))


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200])
def test_without_a_rule_it_is_the_model_itself(model: Any, length: int) -> None:
    ids = tokens(length, batch=2)
    own = logits(model, ids)
    with hf.use(model):
        replaced = logits(model, ids, torch.ones_like(ids))
    assert torch.allclose(replaced, own, atol=2e-5, rtol=0)
    assert own.std() > 0.1


@pytest.mark.parametrize(
    "rule", [SlidingWindow(5), SlidingWindow(9) | AttentionSink(2), lambda b, h, q, k: k % 3 != 1]
)
def test_a_rule_is_the_mask_written_out(model: Any, rule: Any) -> None:
    ids = tokens(65)
    with hf.use(model, rule=rule):
        replaced = logits(model, ids)
    written_out = by_hand(model, ids, fs.MaskRule.of(rule))
    assert torch.allclose(replaced, written_out, atol=2e-5, rtol=0)
    assert not torch.allclose(replaced, logits(model, ids), atol=1e-2, rtol=0)


def test_no_rule_lets_a_token_see_the_next(model: Any) -> None:
    ids = tokens(64)
    changed = ids.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % VOCABULARY
    with hf.use(model, rule=lambda b, h, q, k: k >= 0, select=Random(block=8, q_block=8, keep=3)):
        assert torch.equal(logits(model, ids)[0, :40], logits(model, changed)[0, :40])


def test_every_layer_selects_by_its_own_q_and_k(model: Any) -> None:
    """What `told` hears is what the reference gives for the q, k and v of that layer."""
    ids, heard = tokens(70), {}
    select = Quest(block=8, q_block=8, keep=2)
    with hf.use(model, select=select, tile=16, told=lambda i, found: heard.update({i: found})):
        logits(model, ids)
    assert sorted(heard) == list(range(LAYERS))
    chosen = [heard[i].layout.select for i in range(LAYERS)]
    assert all(result.plan.tile == (16, 16) for result in heard.values())
    assert not torch.equal(chosen[0].indices, chosen[1].indices)

    from flexsparse.experiment.model import capture

    q, k, v = capture(model, ids, [0])[0]
    truth = fs.reference(
        q, k, v, rule=Causal(), select=select.select(q, k, fs.Grid(70, 70), Causal())
    )
    assert torch.allclose(heard[0].out.double(), truth.out, atol=1e-5)


def test_one_selector_a_layer(model: Any) -> None:
    ids, heard = tokens(64), {}
    reuse = Reuse(OracleTopK(block=8, q_block=8, keep=2), layers=(1,))
    lists = [reuse[i] for i in range(LAYERS)]
    with hf.use(model, select=lists, told=lambda i, found: heard.update({i: found})):
        logits(model, ids)
    assert heard[0].layout.select is None
    assert torch.equal(heard[1].layout.select.indices, heard[2].layout.select.indices)
    with hf.use(model, select=lists[:1]), pytest.raises(fs.FlexSparseError, match="a layer 1"):
        logits(model, ids)


def test_gradients_are_the_models_own(model: Any) -> None:
    ids = tokens(40)
    found = []
    for replaced in (False, True):
        model.zero_grad()
        if replaced:
            with hf.use(model):
                model(ids, labels=ids, use_cache=False).loss.backward()
        else:
            model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    for mine, own in zip(found[1], found[0], strict=True):
        assert torch.allclose(mine, own, atol=1e-5 * own.abs().max().clamp(min=1).item())


def test_generation_over_a_cache_that_grows(model: Any) -> None:
    """Token by token the window must give what whole prompts, made longer each time, give."""
    ids, rule = tokens(30), SlidingWindow(6) | AttentionSink(1)
    with hf.use(model, rule=rule):
        made = model.generate(ids, max_new_tokens=8, do_sample=False)
        whole = ids
        for _ in range(8):
            whole = torch.cat([whole, logits(model, whole)[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, whole)
    assert not torch.equal(made, model.generate(ids, max_new_tokens=8, do_sample=False))


def test_a_prompt_in_parts_is_the_prompt(model: Any) -> None:
    ids = tokens(48)
    with torch.no_grad(), hf.use(model, rule=SlidingWindow(10)):
        whole = model(ids, use_cache=False).logits
        first = model(ids[:, :20], use_cache=True)
        past = getattr(first, "cache", None) or first.past_key_values
        for keyword in ("cache", "past_key_values"):
            try:
                rest = model(ids[:, 20:], use_cache=True, **{keyword: past}).logits
                break
            except TypeError:
                continue
    assert torch.allclose(rest, whole[:, 20:], atol=2e-5, rtol=0)


def test_the_model_is_as_it_was_afterwards(model: Any) -> None:
    from transformers import AttentionInterface

    before, known = model.config._attn_implementation, set(AttentionInterface().keys())
    own = logits(model, tokens(20))
    with hf.use(model, rule=SlidingWindow(2)):
        with hf.use(model, rule=SlidingWindow(3)):
            inner = logits(model, tokens(20))
        outer = logits(model, tokens(20))
    with pytest.raises(ZeroDivisionError), hf.use(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
    assert set(AttentionInterface().keys()) == known
    assert torch.equal(logits(model, tokens(20)), own)
    assert not torch.equal(inner, outer) and not torch.equal(outer, own)


def test_scores_and_inference_mode(model: Any) -> None:
    ids = tokens(20)
    with torch.inference_mode(), hf.use(model, score=Softcap(1.0)):
        capped = model(ids, use_cache=False).logits
    assert not torch.allclose(capped, logits(model, ids), atol=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_it_is_on_a_cpu(model: Any, device: torch.device) -> None:
    from copy import deepcopy

    ids, there = tokens(200, batch=2), deepcopy(model).to(device)
    for select in (None, Quest(block=16, q_block=16, keep=4)):
        with hf.use(model, select=select):
            here = logits(model, ids)
        with hf.use(there, select=select):
            assert torch.allclose(logits(there, ids.to(device)).cpu(), here, atol=5e-3, rtol=0)


# ---- what is refused


def test_padding_is_refused(model: Any) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with hf.use(model), pytest.raises(fs.FlexSparseError, match="hides 3 padding tokens of 18"):
        logits(model, tokens(9, batch=2), mask)


def test_a_mask_of_ones_own_is_refused(model: Any) -> None:
    with hf.use(model), pytest.raises(fs.FlexSparseError, match="layer 0 was given a Tensor"):
        logits(model, tokens(9), torch.zeros(1, 1, 9, 9))


def test_packed_sequences_are_refused(model: Any) -> None:
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with (
        hf.use(model),
        pytest.raises(fs.FlexSparseError, match="another mask than the plain causal"),
    ):
        model(tokens(7), position_ids=places, use_cache=False)


def test_a_cache_of_fixed_size_is_refused(model: Any) -> None:
    with hf.use(model), pytest.raises(fs.FlexSparseError, match="use transformers' DynamicCache"):
        model.generate(
            tokens(9), max_new_tokens=2, do_sample=False, cache_implementation="static",
            disable_compile=True,
        )  # fmt: skip


def test_what_depends_on_earlier_queries_is_refused_over_a_cache(model: Any) -> None:
    for select, words in (
        (H2O(heavy=2, recent=4), "H2O needs every query"),
        (SnapKV(prompt=5, window=3), "SnapKV needs"),
    ):
        with hf.use(model, select=select), pytest.raises(fs.FlexSparseError, match=words):
            model.generate(tokens(9), max_new_tokens=3, do_sample=False)


def test_dropout_is_refused() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=VOCABULARY, attention_dropout=0.1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    with hf.use(model), pytest.raises(fs.FlexSparseError, match=r"dropout of 0\.1"):
        model(tokens(9))


def test_models_with_an_attention_of_their_own_are_refused() -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    sliding = transformers.MistralForCausalLM(
        transformers.MistralConfig(**small, sliding_window=4)
    ).eval()
    with hf.use(sliding), pytest.raises(fs.FlexSparseError, match="another mask than the plain"):
        logits(sliding, tokens(9))
    capped = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**small, layer_types=["full_attention"] * 2)
    ).eval()
    with hf.use(capped), pytest.raises(fs.FlexSparseError, match="gives its attention softcap"):
        logits(capped, tokens(9))
    encoder = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()
    with hf.use(encoder), pytest.raises(fs.FlexSparseError, match="another mask than the plain"):
        encoder(tokens(9))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"select": torch.zeros(1, 1, 4, 2)}, "select must be a Selector, or a list"),
        ({"select": [Quest(), 3]}, "select must be a Selector, or a list"),
        (
            {
                "select": fs.Selection.from_indices(
                    torch.zeros(1, 1, 4, 2).long(), kv_len=4, q_len=4
                )
            },
            "a Selection belongs to one call",
        ),
        ({"rule": 3}, "rule"),
    ],
)
def test_other_arguments(model: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(fs.FlexSparseError, match=words), hf.use(model, **given):
        pass


def test_only_models_of_transformers() -> None:
    with pytest.raises(fs.FlexSparseError, match="got Linear"), hf.use(torch.nn.Linear(2, 2)):
        pass


def test_without_transformers_the_error_names_the_extra(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(fs.FlexSparseError, match=r"pip install 'flexsparse\[hf\]'"), hf.use(model):
        pass
