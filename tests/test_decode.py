"""Decoding: few queries over long lists, walked in parts, against the reference and a plain oracle."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from oracle import close, dense
from torch import Tensor

import flexsparse as fs
from flexsparse.backends import compiled, decode, flex, split_walk
from flexsparse.errors import BackendError
from flexsparse.masks import Alibi, AttentionSink, Causal, SlidingWindow
from flexsparse.shapes import ceil_div

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
STREAMING = Causal() & (SlidingWindow(20) | AttentionSink(3))
EVERY_THIRD = fs.MaskRule.of(lambda b, h, q, kv: (kv + h + b) % 3 == 0)
# Some tiles are full, and the others partial.
THINNED = fs.MaskRule.of(lambda b, h, q, kv: (kv < 150) | (kv % 2 == 0))


def drawn(
    device: Any, q_len: int, kv_len: int, *, batch: int = 2, kv_heads: int = 2, group: int = 4,
    dims: tuple[int, int] = (16, 16), dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, kv_heads * group, q_len, dims[0])]
    shapes += [(batch, kv_heads, kv_len, d) for d in dims]
    return tuple(torch.randn(s, generator=draw).to(device, dtype) for s in shapes)


def pages(
    device: Any, q_len: int, kv_len: int, page: int, heads: int, *, batch: int = 2, width: int = 5,
    q_block: int = 1, seed: int = 0,
) -> fs.Selection:  # fmt: skip
    """Unsorted pages with repeats and holes; the last sequence's last head has none."""
    draw = torch.Generator().manual_seed(seed)
    shape = (batch, heads, ceil_div(q_len, q_block), width)
    indices = torch.randint(-1, ceil_div(kv_len, page), shape, generator=draw)
    indices[-1, -1] = -1
    return fs.Selection.from_indices(
        indices.to(device), q_len=q_len, kv_len=kv_len, kv_block=page, q_block=q_block
    )


def judge(inputs: tuple[Tensor, ...], **options: Any) -> None:
    with torch.no_grad():
        fs.check(*inputs, backend="decode", grads=False, **options).raise_if_failed()


@pytest.fixture(params=DEVICES)
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.mark.parametrize("page", [16, 32, 64, 128, 48, 1])
@pytest.mark.parametrize("q_len", [1, 2, 7])
@pytest.mark.parametrize("kv_len", [1, 7, 63, 64, 65, 200])
def test_pages_of_every_size(where: str, kv_len: int, q_len: int, page: int) -> None:
    inputs = drawn(where, q_len, kv_len)
    for heads in (1, 2, 8):
        judge(inputs, select=pages(where, q_len, kv_len, page, heads, seed=kv_len + heads))


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("rule", [None, Causal(), STREAMING, EVERY_THIRD], ids=str)
def test_groups_and_rules(where: str, rule: Any, group: int) -> None:
    for q_len, page in ((1, 64), (3, 16), (8, 128)):
        inputs = drawn(where, q_len, 300, group=group)
        for heads in (0, 1, 2, 2 * group):
            select = pages(where, q_len, 300, page, heads) if heads else None
            judge(inputs, rule=rule, select=select)


@pytest.mark.parametrize("offset", [-5, 0, 150, "each"])
def test_positions_and_fallbacks(where: str, offset: Any) -> None:
    if offset == "each":
        offset = torch.tensor([3, 199], device=where)
    inputs = drawn(where, 2, 200)
    for heads, fallback in ((1, None), (2, "self"), (8, ("local", 30))):
        select = pages(where, 2, 200, 32, heads)
        judge(inputs, rule=STREAMING, select=select, q_offset=offset, fallback=fallback)
    judge(inputs, rule=Causal(), q_offset=offset)


@pytest.mark.parametrize("dims", [(64, 64), (80, 48), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_head_dims_and_precisions(where: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    for q_len, rule in ((1, None), (5, STREAMING)):
        inputs = drawn(where, q_len, 333, dims=dims, dtype=dtype)
        judge(inputs, rule=rule, select=pages(where, q_len, 333, 64, 2))
        judge(
            drawn(where, q_len, 320, dims=dims, dtype=dtype), select=pages(where, q_len, 320, 64, 2)
        )


def test_keys_that_do_not_fold(where: str) -> None:
    """A cache [B, S, Hkv, D]: one list a KV head is walked once for all query heads of its group."""
    q, k, v = drawn(where, 1, 200)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    for rule in (None, STREAMING, EVERY_THIRD):
        select = pages(where, 1, 200, 64, 2)
        plan = fs.make_plan(q, k, v, rule=rule, select=select, backend="decode")
        assert plan.address.fold == 1
        judge((q, k, v), rule=rule, select=select)


def test_nothing_selected_gives_zero(where: str) -> None:
    inputs = drawn(where, 2, 200)
    for heads in (1, 2, 8):
        indices = torch.full((2, heads, 2, 3), -1, device=where)
        select = fs.Selection.from_indices(indices, q_len=2, kv_len=200, kv_block=64)
        for rule in (None, Causal()):
            out, lse = fs.attention(
                *inputs, rule=rule, select=select, backend="decode", return_lse=True
            )
            assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_lse_and_sink(where: str) -> None:
    inputs, select = drawn(where, 2, 200), pages(where, 2, 200, 64, 2)
    sink = torch.randn(8, device=where)
    judge(inputs, select=select, sink=sink)
    judge(inputs, rule=STREAMING, sink=sink)
    out, lse = fs.attention(
        *inputs, rule=STREAMING, select=select, backend="decode", return_lse=True
    )
    assert lse.dtype == torch.float32
    true = fs.reference(*inputs, rule=STREAMING, select=select)
    close(out.cpu(), true.out.cpu(), atol=2e-5)
    close(lse.cpu(), true.lse.cpu(), atol=2e-5)


@pytest.mark.parametrize("q_len", [1, 3])
def test_what_is_not_listed_is_not_read(where: str, q_len: int) -> None:
    """Other pages hold NaN; with sanitize unseen keys inside a listed page may, too."""
    q, k, v = drawn(where, q_len, 256)
    select = fs.Selection.from_indices(
        torch.tensor([1, 3], device=where).expand(2, 2, q_len, 2), q_len=q_len, kv_len=256, kv_block=64
    )  # fmt: skip
    seen = torch.zeros(256, dtype=torch.bool, device=where)
    seen[64:128] = seen[192:] = True
    true = dense(q.cpu(), k.cpu(), v.cpu(), seen.cpu())[0]
    k, v = (x.masked_fill(~seen[:, None], torch.nan) for x in (k, v))
    close(fs.attention(q, k, v, select=select, backend="decode").cpu(), true, atol=2e-5)
    rule = fs.MaskRule.of(lambda b, h, q, kv: kv != 70)
    seen[70] = False
    true = dense(q.cpu(), k.nan_to_num().cpu(), v.nan_to_num().cpu(), seen.cpu())[0]
    k[:, :, 70] = v[:, :, 70] = torch.nan
    options: dict[str, Any] = {"rule": rule, "select": select, "sanitize": True}
    close(fs.attention(q, k, v, backend="decode", **options).cpu(), true, atol=2e-5)


def test_the_same_bits_twice(where: str) -> None:
    inputs = drawn(where, 1, 2048, dims=(64, 64), dtype=torch.bfloat16)
    plan = fs.make_plan(*inputs, select=pages(where, 1, 2048, 64, 2, width=20), backend="decode")
    first = plan.run(*inputs, return_lse=True)
    for _ in range(3):
        again = plan.run(*inputs, return_lse=True)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


def test_any_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than tiles, and one that does all."""
    inputs, select = drawn("cpu", 1, 300), pages("cpu", 1, 300, 16, 2, width=9)
    for programs in (0, 1, 8, 1000):
        monkeypatch.setattr(split_walk, "_PROGRAMS_EACH", programs)
        judge(inputs, rule=STREAMING, select=select)
        judge(inputs, rule=EVERY_THIRD)


def test_one_compiled_function_takes_pages_of_many_sizes() -> None:
    """Which torch takes for a number that varies, from the second on."""
    inputs = drawn("cpu", 1, 200)

    @torch.compile(fullgraph=True, backend="eager")
    def step(q: Tensor, k: Tensor, v: Tensor, select: fs.Selection) -> Tensor:
        out: Tensor = fs.attention(q, k, v, select=select, backend="decode")
        return out

    for page in (64, 16, 32, 128):
        select = pages("cpu", 1, 200, page, 2)
        close(step(*inputs, select), fs.reference(*inputs, select=select).out, atol=2e-5)


def test_compiled_user_code(where: str) -> None:
    inputs = drawn(where, 1, 200)
    select = pages(where, 1, 200, 64, 2)

    @torch.compile(fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, rule: Any) -> Tensor:
        return fs.attention(q, k, v, rule=rule, select=select, backend="decode") * 2

    for rule in (None, STREAMING):
        # A composed rule is traced where it is first met, and that is not inside.
        fs.make_plan(*inputs, rule=rule, select=select)
        true = fs.reference(*inputs, rule=rule, select=select).out * 2
        close(step(*inputs, rule).cpu(), true.cpu(), atol=2e-5)


def test_what_is_refused() -> None:
    q, k, v = drawn("cpu", 1, 64)
    with pytest.raises(BackendError, match="no backward; use backend='tiles'"):
        fs.attention(q.requires_grad_(), k, v, backend="decode")
    q = q.detach()
    with pytest.raises(BackendError, match=r"no score rule \(backend='flex' does\)"):
        fs.attention(q, k, v, score=Alibi(torch.ones(8)), backend="decode")
    with pytest.raises(BackendError, match="no fp64"):
        fs.attention(q.double(), k.double(), v.double(), backend="decode")
    with pytest.raises(BackendError, match="up to 128 query rows .*, got 33 queries in 4 heads"):
        fs.attention(*drawn("cpu", 33, 64), backend="decode")
    with pytest.raises(BackendError, match="head dims up to 256, got 264 and 16"):
        fs.attention(*drawn("cpu", 1, 64, dims=(264, 16)), backend="decode")


@pytest.mark.parametrize(
    ("page", "tile", "dtype", "given"),
    [
        (64, None, torch.bfloat16, (16, 64)),
        (16, None, torch.bfloat16, (16, 16)),
        (8, None, torch.bfloat16, (16, 16)),
        (256, None, torch.bfloat16, (16, 128)),
        (48, None, torch.bfloat16, (16, 64)),
        (128, None, torch.float32, (16, 64)),
        (64, (128, 32), torch.bfloat16, (16, 32)),
    ],
)
def test_tiles_follow_the_pages(page: int, tile: Any, dtype: Any, given: tuple[int, int]) -> None:
    inputs = drawn("cpu", 1, 512, dims=(256, 256), dtype=dtype)
    select = pages("cpu", 1, 512, page, 2)
    plan = fs.make_plan(*inputs, select=select, backend="decode", tile=tile)
    assert plan.tile == given
    if not page % given[1]:
        # Pages that are whole tiles need no mask at all.
        assert plan.first is not None and int(plan.first.kv_num_blocks.sum()) == 0
        assert not plan.program.asks_member(plan.tile)


@pytest.mark.parametrize("rule", [None, STREAMING, EVERY_THIRD], ids=str)
def test_lists_joined_for_torchs_decoding(rule: Any) -> None:
    inputs = drawn("cpu", 1, 300)
    for select in (pages("cpu", 1, 300, 64, 2), None):
        if rule is None and select is None:
            continue
        plan = fs.make_plan(*inputs, rule=rule, select=select, backend="flex", tile=(16, 64))
        layout = plan.first
        assert layout is not None
        number, tiles, *none = flex.partial_only(layout.lists, flex.asks_pairs(layout))
        assert none == [None, None] and number is not None and tiles is not None
        whole = torch.zeros((*number.shape, layout.span.tiles[1]), dtype=torch.int64)
        used = torch.arange(tiles.shape[-1]) < number[..., None]
        whole.scatter_add_(-1, tiles.to(torch.int64), used.to(torch.int64))
        partial, full = layout.tile_maps()
        assert torch.equal(whole, (partial | full).to(torch.int64))


def test_lists_of_other_lengths_are_joined_by_the_same_code() -> None:
    """As a kernel for lengths that vary has it: nothing of the layout it was compiled for is left."""
    found = []

    def body(lists: list[Tensor]) -> list[Tensor | None]:
        return flex.partial_only(lists, True)

    run = torch.compile(body, backend="eager", fullgraph=True, dynamic=True)
    for length in (300, 500, 4096, 64):
        layout = fs.build_layout(
            rule=THINNED, grid=fs.Grid(1, length), heads=(4, 2), block_size=(16, 64)
        )
        number, tiles, *_ = run(layout.lists)
        assert number is not None and tiles is not None
        listed = tiles[..., : int(number.max())].flatten().sort().values
        some, full = layout.tile_maps()
        assert listed.tolist() == (some | full)[0, 0, 0].nonzero().flatten().tolist()
        found.append(len(listed))
    assert len(set(found)) > 2


def test_what_is_compiled_holds_no_layout() -> None:
    """Nor its candidates: a kernel outlives whatever it was first made for."""
    inputs = drawn("cpu", 1, 300)
    plan = fs.make_plan(
        *inputs, rule=STREAMING, select=pages("cpu", 1, 300, 64, 2), backend="flex", tile=(16, 64)
    )
    assert plan.first is not None
    kept = [weakref.ref(plan.first), weakref.ref(plan.first.kv_indices)]
    plan.run(*inputs)
    assert compiled._kernels
    del plan
    gc.collect()
    assert [made() for made in kept] == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [None, THINNED], ids=str)
def test_a_growing_sequence_by_torchs_decoding_kernel(rule: Any, device: torch.device) -> None:
    for length in (512, 700, 4096, 1024, 8192):
        inputs = drawn(device, 1, length, dims=(128, 128), dtype=torch.bfloat16)
        select = None if rule is not None else pages(device, 1, length, 64, 2)
        with torch.no_grad():
            options: dict[str, Any] = {"rule": rule, "select": select, "backend": "flex"}
            fs.check(*inputs, **options, grads=False).raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["decode", "flex"])
@pytest.mark.parametrize("rule", [None, STREAMING], ids=str)
def test_a_graph_replays_other_pages(rule: Any, backend: Any, device: torch.device) -> None:
    inputs = drawn(device, 1, 4096, dims=(128, 128), dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(-1, 64, (2, 2, 1, 16), generator=draw).to(device)

    def select() -> fs.Selection:
        return fs.Selection.from_indices(
            indices, q_len=1, kv_len=4096, kv_block=64, out_of_range="drop"
        )

    plan = fs.make_plan(*inputs, rule=rule, select=select(), backend=backend)
    assert plan.tile == (16, 64)

    def step() -> fs.Result:
        return plan.run(*inputs, plan.layout(select()), return_lse=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(), step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(3):
        indices.copy_(torch.randint(-1, 64, indices.shape, generator=draw))
        graph.replay()
        true = fs.reference(*inputs, rule=rule, select=select())
        torch.testing.assert_close(result.out.double(), true.out.double(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(result.lse.double(), true.lse.double(), atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [16, 32, 64, 128])
@pytest.mark.parametrize("splits", [1, 2, 7, 100])
def test_every_shape_of_the_kernel(splits: int, keys: int, device: torch.device) -> None:
    """Steps of one tile, of several and of a part, with and without what is asked of pairs."""
    from flexsparse.backends.asked import asked
    from flexsparse.backends.triton_decode import Shape, launch

    for tile in (16, 64, 128):
        for rule, kv_len in ((None, 1024), (None, 1000), (EVERY_THIRD, 1000)):
            inputs = drawn(device, 2, kv_len, dims=(64, 64), dtype=torch.float16)
            select = pages(device, 2, kv_len, tile, 2, width=7, q_block=2)
            plan = fs.make_plan(
                *inputs, rule=rule, select=select, backend="decode", pack="identity"
            )
            layout = plan.first
            assert layout is not None
            lists = [x[:, ::4] for x in layout.lists[:4]]
            lanes = split_walk.lanes_of(inputs[0], inputs[1], lists[0])
            work = decode.Work(*inputs, layout, None, (), plan.scale, True, False)
            mask = asked(work, lanes, lists[1])
            out, lse = launch(
                *inputs, lists, mask, plan.tile[1], 64, plan.scale, Shape(splits, keys, 4, 3)
            )
            true = fs.reference(*inputs, rule=rule, select=select)
            torch.testing.assert_close(out.double(), true.out.double(), atol=3e-3, rtol=1e-2)
            torch.testing.assert_close(lse.double(), true.lse.double(), atol=3e-3, rtol=1e-3)


@pytest.mark.gpu
def test_auto_decodes(device: torch.device) -> None:
    inputs = drawn(device, 1, 512, dims=(64, 64), dtype=torch.bfloat16)
    assert fs.make_plan(*inputs, select=pages(device, 1, 512, 64, 2)).backend == "decode"
    assert fs.make_plan(*inputs, rule=Causal()).backend == "decode"
    assert fs.make_plan(*drawn(device, 64, 512), rule=Causal()).backend == "flex"
