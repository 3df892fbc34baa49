"""FlashAttention-4 under FlexAttention: the fastest kernel on Hopper, where its conditions hold.

torch hands the same BlockMask, mask_mod and score_mod to flash-attn-4's kernels. It does so only when
told, never by itself; what those kernels cannot do they answer with an error in the middle of a
compile, or, where a mask_mod says nothing, with dense attention. So everything is judged here, before.
"""

from __future__ import annotations

import math
import re
from functools import cache
from importlib.util import find_spec
from types import CodeType

import torch
from torch import Tensor

from flexsparse.backends import Call, Work, flex
from flexsparse.backends.flash_words import mask_in_words, score_in_words, unknown
from flexsparse.program import MaskProgram, ScoreProgram

name = "flash"

# Rows and keys that its Hopper kernels compute at once.
TILE = 128
# Of a rule: with so many its kernels have compiled within a test's time, with six and more not in 100 s.
_MOST_DIVISIONS = 3
_DIVISION = re.compile(r"torch\.ops\.aten\.(?:remainder|floor_divide|fmod)\.")


@cache
def _lse_unit() -> float:
    """By what torch's lse of these kernels is to be multiplied for a natural one.

    They give a natural lse. torch before 2.13 took it for one of base 2, and converted it once more.
    """
    from torch.nn.attention.flex_attention import flex_attention

    inner = (c for c in flex_attention.__code__.co_consts if isinstance(c, CodeType))
    asks = any("stats_are_log2" in code.co_varnames for code in inner)
    return 1.0 if asks else 1 / math.log(2)


_SPEECH = flex.Speech(mask_in_words, score_in_words, points=True, lse_unit=_lse_unit)


def refuses(call: Call) -> str | None:
    """Why FlashAttention-4 cannot run this call exactly, or None."""
    if call.device.type != "cuda":
        return "FlashAttention-4 runs on CUDA only"
    if not installed():
        return "flash-attn-4 is not installed (pip install 'flexsparse[flash]')"
    if torch.cuda.get_device_capability(call.device) != (9, 0):
        return "FlashAttention-4 has been checked on compute capability 9.0 only"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention-4 computes in fp16 and bf16, got {call.dtype}"
    dims = (call.head_dim, call.v_head_dim)
    if not all(d % 8 == 0 and 16 <= d <= 128 for d in dims):
        return f"FlashAttention-4 needs head dims of 16 to 128 in multiples of 8, got {dims[0]}, {dims[1]}"
    if call.score is not None and (call.grads or call.learned):
        return "FlashAttention-4 has given wrong gradients where a score rule was computed"
    if call.grads and call.lse:
        return "FlashAttention-4 has no backward through lse"
    return _unsaid(call.program, call.score)


def compiles_long(call: Call) -> str | None:
    """Why nobody should wait for these kernels who has not asked for them, or None."""
    rule = call.program.rule
    divisions = 0 if rule is None else len(_DIVISION.findall(rule.code))
    if divisions <= _MOST_DIVISIONS:
        return None
    return (
        f"its code repeats a rule for every pair of a tile, and {divisions} divisions of integers compile "
        "for minutes (backend='flash' takes them)"
    )


def tile_for(tile: tuple[int, int], call: Call) -> tuple[int, int]:
    """Whole multiples of its tiles by row, and its own tile by key."""
    return (math.ceil(tile[0] / TILE) * TILE, TILE)


def run(work: Work) -> tuple[Tensor, Tensor | None]:
    return flex.again(work, name) or flex.run_with(work, {"BACKEND": "FLASH"}, _SPEECH)


@cache
def installed() -> bool:
    """Whether torch can find FlashAttention-4."""
    try:
        return find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def _unsaid(program: MaskProgram, score: ScoreProgram | None) -> str | None:
    """What of the mods its code generator does not know."""
    if program.asks_member((TILE, TILE)):
        return (
            "FlashAttention-4 reads no words of membership, and these candidates do not fill its tiles of "
            f"{TILE}x{TILE}"
        )
    for traced in (program.rule, score.score if score else None):
        if traced is not None and (words := unknown(traced)):
            return f"FlashAttention-4 does not know {', '.join(words)} of {traced.name}"
    if score is not None and score.score.gathers > 1:
        return f"FlashAttention-4 reads one table for each pair, and {score.score.name} more"
    return None
