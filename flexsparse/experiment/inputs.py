"""The tensors of an experiment: the sample that comes along, a file, random numbers, or a model's."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flexsparse.arguments import check_qkv
from flexsparse.errors import ConfigError
from flexsparse.experiment.config import Input, RandomInput
from flexsparse.experiment.model import QKV, Read, read
from flexsparse.resolve import find_file

SAMPLES = Path(__file__).parent.parent / "samples"


def load_inputs(
    given: Input,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    beside: Path = Path(),
    model: Read | None = None,
) -> QKV:
    """``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]``, ``v [B, Hkv, S, Dv]``, all contiguous.

    Files are looked for in ``beside``, then in the current folder. ``model``: the one of the input,
    where it is at hand.
    """
    if given.random is not None:
        q, k, v = _random(given.random, seed)
    elif given.file is not None:
        q, k, v = _stored(find_file(given.file, beside))
    elif given.model is not None:
        model = model or read(given.model, dtype, device, beside)
        q, k, v = model.layer(given.model.layer)
    else:
        assert given.sample is not None
        stored = _stored(SAMPLES / f"{given.sample.name}_layer.safetensors")
        q, k, v = (x[:, :, : given.sample.tokens] for x in stored)
    q, k, v = (x.to(device, dtype).contiguous() for x in (q, k, v))
    check_qkv(q, k, v)
    for name, x in zip("qkv", (q, k, v), strict=True):
        if bad := int((~x.isfinite()).sum()):
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name} holds {bad:,} values of {x.numel():,} that are not finite in {kind}, so "
                "no result could be held against the reference"
            )
    return q, k, v


def _random(shape: RandomInput, seed: int) -> QKV:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if shape.bytes > memory:
        raise ConfigError(
            f"q, k and v of this shape take {shape.bytes / 2**30:.3g} GiB, more than the "
            f"{memory / 2**30:.3g} GiB of this machine"
        )
    draw = torch.Generator().manual_seed(seed)
    keys = (shape.kv_heads or shape.heads, shape.kv_len or shape.q_len)
    sizes = ((shape.heads, shape.q_len), keys, keys)
    # Drawn on the CPU, so that every device gets the same numbers.
    q, k, v = (torch.randn(shape.batch, *size, shape.head_dim, generator=draw) for size in sizes)
    return q, k, v


def _stored(path: Path) -> QKV:
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from None
    missing = [name for name in "qkv" if name not in found]
    if missing:
        raise ConfigError(
            f"{path} must hold q, k and v; {', '.join(missing)} is missing from "
            f"{', '.join(sorted(found)) or 'nothing'}"
        )
    q, k, v = found["q"], found["k"], found["v"]
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not x.is_floating_point():
            kind = str(x.dtype).removeprefix("torch.")
            raise ConfigError(f"{name} of {path} must be floating point numbers, got {kind}")
    return q, k, v
