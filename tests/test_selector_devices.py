"""Every selector of the gallery: the same sets on every device, in a graph, and in memory of its candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexsparse as fs
from flexsparse.kernels.parts import PAIRS_AT_ONCE
from flexsparse.masks import Causal
from flexsparse.selectors import (
    H2O,
    MSA,
    NSA,
    AShapeBlocks,
    BlockSparse,
    FlexPrefill,
    InfLLMv2,
    Mass,
    MeanPooled,
    MInference,
    MoBA,
    OracleTopK,
    OracleTopP,
    Quest,
    Random,
    ReformerLSH,
    Routing,
    SnapKV,
    SpargeAttn,
    StreamingLLM,
    Tiles,
    Twilight,
    VerticalSlashBlocks,
    XAttention,
    parts,
    xattention,
)
from flexsparse.selectors.windows import windows

LENGTHS = [(1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (200, 200), (7, 65), (1, 200)]
small: dict[str, Any] = {"block": 16, "q_block": 8}
# Those that rate blocks by their own score.
SCORED: dict[str, Callable[[], fs.Selector]] = {
    "quest": lambda: Quest(**small, keep=3),
    "quest, one query, own lists": lambda: Quest(block=16, q_block=1, keep=3, heads="query"),
    "quest, shared": lambda: Quest(**small, keep=0.4, heads="shared"),
    "quest, mass": lambda: Quest(**small, keep=Mass(0.6)),
    "quest, tiles": lambda: Quest(**small, keep=Tiles(q_tile=16, kv_tile=32, most=2, each=3)),
    "quest, a head each": lambda: Quest(**small, keep=(2, 3)),
    "mean": lambda: MeanPooled(**small, keep=3),
    "moba": lambda: MoBA(block=16),
    "moba, rows, kv": lambda: MoBA(**small, heads="kv"),
    "nsa": lambda: NSA(length=8, stride=4, block=16, keep=5),
    "nsa, paper, shared": lambda: NSA(
        length=8, stride=4, block=8, q_block=7, keep=5, alignment="paper", heads="shared"
    ),
    "infllm": lambda: InfLLMv2(length=8, stride=4, block=16, keep=5, local=1),
    "infllm, shared": lambda: InfLLMv2(
        length=8, stride=4, block=16, keep=5, local=1, heads="shared"
    ),
    "msa": lambda: MSA(block=16, keep=3),
}
OTHERS: dict[str, Callable[[], fs.Selector]] = {
    "block sparse": lambda: BlockSparse(**small, keep=2),
    "sparge": lambda: SpargeAttn(**small),
    "streaming": lambda: StreamingLLM(**small, window=20),
    "random": lambda: Random(**small, keep=3),
    "a-shape": lambda: AShapeBlocks(**small, window=9),
    "minference": lambda: MInference(
        patterns=(
            VerticalSlashBlocks(**small, vertical=2, slash=2),
            AShapeBlocks(**small, window=9),
            BlockSparse(**small, keep=3),
        )
    ),
    "flex prefill": lambda: FlexPrefill(**small, gamma=0.4, tau=0.3),
    "xattention": lambda: XAttention(**small, stride=4, tau=0.6),
    "vertical slash": lambda: VerticalSlashBlocks(**small, vertical=2, slash=2),
    "h2o": lambda: H2O(heavy=3, recent=4),
    "reformer": lambda: ReformerLSH(chunk=8, keep=9),
    "routing": lambda: Routing(clusters=4, keep=9),
    "twilight": lambda: Twilight(base=Quest(block=16, keep=4, q_block=1), mass=0.7),
    "oracle": lambda: OracleTopK(**small, keep=3),
    "oracle, mass": lambda: OracleTopP(**small, keep=Mass(0.7)),
}
GALLERY = SCORED | OTHERS


def drawn(q_len: int, kv_len: int, *, heads: int = 8, dim: int = 32, batch: int = 2) -> Any:
    draw = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    shapes = (batch, heads, q_len, dim), (batch, 2, kv_len, dim)
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)


def exact_scores(selector: fs.Selector, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
    """In fp64; a compressed key has the precision of the keys."""
    if isinstance(selector, NSA | InfLLMv2):
        compressed = windows(k, selector.length, selector.stride).mean(3)
        return selector.importance(q.double(), compressed.double(), grid)
    return selector.score(q.double(), k.double(), grid)


def same_but_for_ties(
    selector: fs.Selector, got: fs.Selection, score: Tensor, want: fs.Selection, dim: int
) -> None:
    """What is chosen instead is worth as much as what is not, as far as fp32 can tell."""
    mine, right = got.blocks(), want.blocks()
    differ = mine != right
    if not isinstance(selector.keep, int | float):
        # A share of mass, or a tile, may be met by one block more or less.
        assert float(differ.float().mean()) <= 0.01
        return
    assert torch.equal(got.counts, want.counts)
    seen = score.masked_fill(score == -torch.inf, 0.0)
    error = dim * 2.0**-22 * dim * max(1.0, float(seen.abs().max()))
    cut = score.masked_fill(~right, torch.inf).amin(-1, keepdim=True)
    assert float(((score - cut).abs() * differ).nan_to_num(0.0, posinf=0.0).max()) <= error


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCORED)
def test_fp32_chooses_what_fp64_does(name: str, kind: torch.dtype, where: str) -> None:
    """From inputs of half precision too: nothing is rounded on the way to a choice but at ties."""
    selector = SCORED[name]()
    for lengths in LENGTHS:
        q, k = (x.to(kind) for x in drawn(*lengths))
        grid = fs.Grid(*lengths, batch=2)
        score = exact_scores(selector, q, k, grid)
        got = selector.select(q.to(where), k.to(where), grid, Causal()).to("cpu")
        want = selector.chosen(q, k, score, grid, Causal())
        same_but_for_ties(selector, got, score, want, q.shape[-1])


@pytest.mark.parametrize("name", GALLERY)
def test_a_grid_of_other_lengths_is_refused(name: str) -> None:
    q, k = drawn(40, 40)
    for grid in (fs.Grid(40, 48, batch=2), fs.Grid(39, 40, batch=2)):
        with pytest.raises(fs.FlexSparseError, match=r"the grid must be Grid\(40, 40, batch=2\)"):
            GALLERY[name]().select(q, k, grid, Causal())


@pytest.mark.gpu
@pytest.mark.parametrize("name", GALLERY)
def test_a_gpu_chooses_what_the_cpu_does(name: str, device: torch.device) -> None:
    """In fp64, where no two scores of random keys are near enough to change places."""
    for lengths in LENGTHS:
        q, k = drawn(*lengths)
        grid = fs.Grid(*lengths, batch=2)
        here = GALLERY[name]().select(q, k, grid, Causal())
        there = GALLERY[name]().select(q.to(device), k.to(device), grid, Causal())
        if name in ("h2o", "twilight"):
            # What they weigh by is fp32 whatever they are given.
            assert float((here.blocks() != there.to("cpu").blocks()).float().mean()) <= 0.01
        else:
            assert torch.equal(here.indices, there.indices.cpu()), lengths


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["quest", "quest, one query, own lists", "mean", "moba", "nsa", "msa"]
)
def test_a_decode_step_in_a_graph(name: str, device: torch.device) -> None:
    """Selection, layout and attention, captured once: each replay is a step outside."""
    selector = SCORED[name]()
    q, k = (x.to(device, torch.bfloat16) for x in drawn(1, 200, dim=64))
    v = k.flip(-1).contiguous()
    grid = fs.Grid(1, 200, batch=2)
    cache, rule = selector.cache(k), Causal()
    plan = fs.make_plan(q, k, v, rule=rule, select=cache.select(q, grid, rule))

    def step() -> tuple[Tensor, Tensor]:
        select = cache.select(q, grid, rule)
        return select.indices, plan.run(q, k, v, plan.layout(select)).out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = step()
    for seed in range(3):
        draw = torch.Generator(device).manual_seed(seed)
        q.copy_(torch.randn(q.shape, generator=draw, device=device))
        graph.replay()
        chosen, out = step()
        assert torch.equal(inside[0], chosen)
        assert torch.equal(inside[1], out)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes, and which one."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.made = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() > self.bytes:
                self.bytes = x.untyped_storage().nbytes()
                self.made = f"{func} {list(x.shape)} {x.dtype}"
        return out


WHOLE: dict[str, Callable[[], fs.Selector]] = {
    "quest": Quest,
    "quest, one query": lambda: Quest(q_block=1, keep=8),
    "mean": MeanPooled,
    "moba": lambda: MoBA(block=64),
    "nsa": NSA,
    "infllm": InfLLMv2,
    "msa": MSA,
    "block sparse": BlockSparse,
    "sparge": SpargeAttn,
    "streaming": StreamingLLM,
    "random": Random,
    "a-shape": AShapeBlocks,
    "minference": MInference,
    "flex prefill": FlexPrefill,
    "xattention": XAttention,
    "vertical slash": VerticalSlashBlocks,
    "h2o": lambda: H2O(heavy=4, recent=4),
    "reformer": lambda: ReformerLSH(chunk=16, keep=32),
    "routing": lambda: Routing(keep=32),
    "twilight": lambda: Twilight(base=Quest(q_block=1, keep=2)),
}

# How many of the last queries speak for all.
VOTERS = {"minference": 64, "vertical slash": 64, "flex prefill": 128}


@pytest.mark.parametrize("name", WHOLE)
def test_memory_is_that_of_the_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a choice without training grows with the square of the length."""
    length, heads, dim = 1024, 4, 8
    monkeypatch.setitem(PAIRS_AT_ONCE, "cpu", 2**15)
    monkeypatch.setattr(parts, "ENTRIES", 2**15)
    monkeypatch.setattr(xattention, "_AT_ONCE", 2**15)
    selector = WHOLE[name]()
    q, k = drawn(length, length, heads=heads, dim=dim, batch=1)
    with Largest() as seen:
        chosen = selector.select(q.float(), k.float(), fs.Grid(length, length), Causal())
    rows, blocks = fs.Grid(length, length).shape(selector.q_block, selector.block)
    # Scores with int64 places of all blocks, where blocks are rated; what is chosen; some last queries
    # against all keys, where these vote; what is given, in fp64.
    rated = heads * rows * blocks * 8 if selector.block > 1 else 0
    listed = chosen.indices.numel() // chosen.heads * heads * 8
    voting = VOTERS.get(name, 0) * heads * length * 4
    assert seen.bytes <= max(rated, listed, voting, q.numel() * 8), seen.made


def test_a_choice_of_all_earlier_keys_is_one_by_definition() -> None:
    """Queries of the prompt, from which SnapKV learns, see all there is; a later one has its list."""
    k = drawn(64, 2048, heads=4, dim=8, batch=1)[1]
    later = SnapKV(prompt=1984, prefix=32, window=32)
    with Largest() as seen:
        later.cache(k[:, :, :1984].float())
    assert seen.bytes <= 2 * 2048 * 8 * 8 + 4096
