"""FlashAttention-4: rules in its words mean the same, and on a GPU give the right result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_gallery_fused as gallery
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.address import FoldedHeads, Identity
from flexsparse.backends import Call, flash, flash_words
from flexsparse.errors import BackendError
from flexsparse.grid import Grid
from flexsparse.masks import Alibi, Causal, Document, SlidingWindow
from flexsparse.parameters import moved
from flexsparse.program import MaskProgram, mask_program, score_program

SIZE = 200


class AsInC(Tensor):
    """Integers that divide as C does: towards zero, the rest with the sign of what is divided."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__mod__, Tensor.remainder):
            func = torch.fmod
        elif func is Tensor.__floordiv__:
            func, kwargs = torch.div, {"rounding_mode": "trunc"}
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("as_in", [Tensor, AsInC])
def test_division_is_right_however_the_generator_rounds(as_in: type[Tensor]) -> None:
    a = torch.arange(-40, 41)[:, None].expand(-1, 9)
    d = torch.tensor([-9, -7, -3, -1, 1, 2, 5, 7, 40]).expand(81, -1)
    c, by = a.as_subclass(as_in), d.as_subclass(as_in)
    assert torch.equal(flash_words.remainder(c, by), torch.remainder(a, d))
    assert torch.equal(flash_words.floor_divide(c, by), torch.floor_divide(a, d))


@pytest.mark.parametrize("limits", [(3, None), (None, 5), (3, 5), (-2, 90)])
def test_clamps_and_extremes_mean_what_torch_means(limits: tuple[int | None, int | None]) -> None:
    x = torch.arange(-8, 9)
    assert torch.equal(flash_words.clamp(x, *limits), x.clamp(*limits))
    y = torch.tensor([0.0, torch.nan, 3.0])
    for ours, theirs in (
        (flash_words.minimum, torch.minimum),
        (flash_words.maximum, torch.maximum),
    ):
        torch.testing.assert_close(ours(y, y.flip(0)), theirs(y, y.flip(0)), equal_nan=True)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", gallery.RULES)
def test_a_rule_in_other_words_allows_the_same(name: str, folded: bool) -> None:
    rule = gallery.RULES[name]
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(-1, SIZE, (3, 2, SIZE, 9), generator=draw)
    select = fs.Selection.from_indices(indices, kv_len=SIZE, q_len=SIZE)
    address = (FoldedHeads if folded else Identity)(4, 2)
    layout = fs.build_layout(
        rule=rule, select=select, grid=Grid(SIZE, SIZE, batch=3), heads=(4, 2), block_size=64
    )
    program = replace(layout.program, address=address)
    if flash_words.unknown(program.rule):
        pytest.skip("it has an operation without a word")
    kernel_heads, batch = address.kernel_heads[0], address.kernel_batch(3)
    b = torch.arange(batch).view(-1, 1, 1, 1)
    h = torch.arange(kernel_heads).view(1, -1, 1, 1)
    q, kv = torch.arange(SIZE).view(-1, 1), torch.arange(SIZE)
    said = flash_words.mask_in_words(program)
    want = program.mod(layout.tables)(b, h, q, kv)
    assert torch.equal(said.mod(layout.tables)(b, h, q, kv).expand_as(want), want)


def test_most_of_the_gallery_can_be_said() -> None:
    programs = [
        mask_program(Identity(4, 2), Grid(SIZE, SIZE, batch=3), rule, None, None)
        for rule in gallery.RULES.values()
    ]
    said = [not flash_words.unknown(p.rule) for p in programs if p.rule is not None]
    assert sum(said) >= 0.9 * len(said)


def test_asking_for_it_without_a_gpu_says_why() -> None:
    q = k = v = torch.zeros(1, 1, 4, 16)
    with pytest.raises(BackendError, match="runs on CUDA only"):
        fs.attention(q, k, v, backend="flash")


@pytest.mark.parametrize("grads", [False, True])
def test_gradients_of_scores_are_left_to_others(
    grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dQ of ``s + 0.01 * (kv_idx - q_idx)`` has been seen to be off by 12.8."""
    monkeypatch.setattr(flash, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    address, grid = Identity(4, 2), Grid(SIZE, SIZE)
    score = fs.ScoreRule.of(lambda s, b, h, q_idx, kv_idx: s + (kv_idx - q_idx) * 0.01)
    call = Call(
        torch.device("cuda"), torch.bfloat16, 64, 64, SIZE, grads, False, False,
        mask_program(address, grid, Causal(), None, None), score_program(address, grid, score),
    )  # fmt: skip
    refusal = flash.refuses(call)
    assert (refusal is not None) == grads
    assert refusal is None or "gradients where a score rule" in refusal


def _draw(
    device: torch.device, lengths: tuple[int, int], dims: tuple[int, int] = (64, 64)
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(3, 4, lengths[0], dims[0]), (3, 2, lengths[1], dims[0]), (3, 2, lengths[1], dims[1])]
    return [torch.randn(s, generator=draw).to(device, torch.bfloat16) for s in shapes]


def _judged(device: torch.device, lengths: tuple[int, int], **options: Any) -> None:
    if not flash.installed():
        pytest.skip("flash-attn-4 is not installed")
    dims = options.pop("dims", (64, 64))
    fs.check(*_draw(device, lengths, dims), backend="flash", **options).raise_if_failed()


def _program(name: str) -> MaskProgram:
    return mask_program(Identity(4, 2), Grid(SIZE, SIZE, batch=3), gallery.RULES[name], None, None)


def _compiles_long(name: str) -> bool:
    call = Call(
        torch.device("cuda"),
        torch.bfloat16,
        64,
        64,
        SIZE,
        False,
        False,
        False,
        _program(name),
        None,
    )
    return flash.compiles_long(call) is not None


def test_rules_of_many_divisions_are_left_to_others() -> None:
    """Neighbourhoods of images and videos compile for minutes; blocks and windows do not."""
    long = {name for name in gallery.RULES if _compiles_long(name)}
    assert {"neighborhood-whole image", "windows video", "sliding-tile image"} <= long
    assert not long & {"dilated", "bigbird", "block-diagonal", "tree", "mixture", "fixed"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * _compiles_long(n)) for n in gallery.RULES],
)
def test_a_rule_of_the_gallery(name: str, device: torch.device) -> None:
    rule = moved(gallery.RULES[name], device)
    program = mask_program(Identity(4, 2), Grid(SIZE, SIZE, batch=3), rule, None, None)
    if flash_words.unknown(program.rule):
        pytest.skip("it has an operation without a word")
    _judged(device, (SIZE, SIZE), rule=rule)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alibi", "softcap", "temperature", "head-bias"])
def test_a_score_of_the_gallery(name: str, device: torch.device) -> None:
    score = next((s for n, s in gallery.SCORES.items() if n.startswith(name)), Alibi(torch.ones(4)))
    _judged(device, (SIZE, SIZE), rule=Causal(), score=moved(score, device))


def _select(device: torch.device, length: int, block: int, keep: int, heads: int) -> fs.Selection:
    draw = torch.Generator().manual_seed(2)
    blocks = -(-length // block)
    indices = torch.randint(-1, blocks, (3, heads, blocks, keep), generator=draw).to(device)
    return fs.Selection.from_indices(
        indices, kv_len=length, q_len=length, kv_block=block, q_block=block
    )


@pytest.mark.gpu
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("length", [130, 1000, 1024])
def test_blocks_whole_and_ragged(length: int, grads: bool, device: torch.device) -> None:
    for rule in (None, Causal()):
        for heads in (1, 2, 4):
            select = _select(device, length, 128, 3, heads)
            _judged(device, (length, length), rule=rule, select=select, grads=False)
            if grads:
                _gradients(device, length, rule, select)


def _gradients(
    device: torch.device, length: int, rule: fs.MaskRule | None, select: fs.Selection
) -> None:
    """Held against the other kernel: `check` asks for gradients through lse, which it has not."""
    found: list[tuple[tuple[Tensor, ...], Tensor]] = []
    for backend in ("flash", "flex"):
        leaves = [x.requires_grad_() for x in _draw(device, (length, length))]
        out = fs.attention(*leaves, rule=rule, select=select, backend=backend)
        flow = torch.randn_like(out, generator=None) if not found else found[0][1]
        found.append((torch.autograd.grad(out, leaves, flow), flow))
    exact = [x.float().requires_grad_() for x in _draw(device, (length, length))]
    out = fs.attention(*exact, rule=rule, select=select, backend="tiles")
    true = torch.autograd.grad(out, exact, found[0][1].float())
    for ours, theirs, right in zip(found[0][0], found[1][0], true, strict=True):
        budget = 2 * (theirs - right).abs().max() + 2**-8 * right.abs().max()
        assert (ours - right).abs().max() <= budget


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(130, 1000), (1, 200), (200, 65)])
def test_queries_that_stand_elsewhere(lengths: tuple[int, int], device: torch.device) -> None:
    for offset in (None, 7, torch.tensor([0, 30, -5], device=device)):
        _judged(device, lengths, rule=SlidingWindow(50), q_offset=offset)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (64, 128), (32, 32), (96, 96)])
def test_head_dims(dims: tuple[int, int], device: torch.device) -> None:
    document = Document((torch.arange(SIZE, device=device) // 60).int())
    _judged(device, (SIZE, SIZE), rule=Causal() & document, dims=dims)


@pytest.mark.gpu
def test_single_keys_are_refused(device: torch.device) -> None:
    if not flash.installed():
        pytest.skip("flash-attn-4 is not installed")
    q, k, v = _draw(device, (SIZE, SIZE))
    indices = torch.arange(9, device=device).expand(3, 1, SIZE, 9)
    select = fs.Selection.from_indices(indices, kv_len=SIZE, q_len=SIZE)
    with pytest.raises(BackendError, match="words of membership"):
        fs.attention(q, k, v, select=select, backend="flash")


@pytest.mark.gpu
def test_what_is_not_listed_is_never_read(device: torch.device) -> None:
    if not flash.installed():
        pytest.skip("flash-attn-4 is not installed")
    q, k, v = _draw(device, (512, 512))
    indices = torch.zeros(3, 1, 4, 1, dtype=torch.int64, device=device)
    select = fs.Selection.from_indices(indices, kv_len=512, q_len=512, kv_block=128, q_block=128)
    want = fs.attention(q, k, v, select=select, backend="flash")
    k[:, :, 128:], v[:, :, 128:] = torch.nan, torch.nan
    assert torch.equal(fs.attention(q, k, v, select=select, backend="flash"), want)
