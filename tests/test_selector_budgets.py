"""Budgets of selectors: counts, fractions, mass and tiles, against their definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from naive_selectors import exponentials, kept, sets, walked
from torch import Tensor

import flexsparse as fs
from flexsparse.masks import Causal
from flexsparse.selectors import (
    MSA,
    NSA,
    BlockSparse,
    InfLLMv2,
    Mass,
    MoBA,
    OracleTopK,
    OracleTopP,
    Quest,
    Tiles,
    recall,
)
from flexsparse.selectors.base import own_blocks

BUDGETS: list[Any] = [
    1,
    3,
    1000,
    0.01,
    0.3,
    0.999,
    Mass(0.3),
    Mass(0.9),
    Mass(0.5, least=2, most=3),
    Mass(0.999, most=4),
]
KINDS = ["random", "tied", "constant", "steep", "broken"]
LENGTHS = [1, 7, 63, 64, 65, 200]


@dataclass(frozen=True, eq=False, kw_only=True)
class Given(fs.Selector):
    """Scores as they are given."""

    given: Tensor
    own: bool = False
    keep: Any = field(default=1)

    def score(self, q: Tensor, k: Tensor, grid: fs.Grid) -> Tensor:
        return self.given

    def forced(self, grid: fs.Grid, device: torch.device) -> Tensor | None:
        return own_blocks(grid, self.q_block, self.block, device, first=1) if self.own else None


def scores(kind: str, shape: tuple[int, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    if kind == "tied":
        return torch.randint(0, 3, shape, generator=draw).float()
    if kind == "constant":
        return torch.full(shape, 2.5)
    made = torch.randn(shape, generator=draw)
    if kind == "steep":
        return made * 300
    if kind == "broken":
        made[torch.rand(shape, generator=draw) < 0.3] = -torch.inf
        made[torch.rand(shape, generator=draw) < 0.3] = torch.nan
    return made


def rowwise(given: Tensor, grid: fs.Grid, blocks: tuple[int, int]) -> Any:
    """``[b][h][r]``: the scores of the blocks that a causal row reaches; -inf is never."""
    lowest = torch.finfo(torch.float32).min
    found = []
    for b in range(given.shape[0]):
        every = grid.positions()
        p = every[b if len(every) > 1 else 0].tolist()
        ends = [p[min((r + 1) * blocks[0], grid.q_len) - 1] for r in range(given.shape[2])]
        found.append(
            [
                [
                    {
                        c: lowest if s != s else s
                        for c, s in enumerate(row)
                        if c * blocks[1] <= ends[r] and s != -torch.inf
                    }
                    for r, row in enumerate(rows)
                ]
                for rows in given[b].tolist()
            ]
        )
    return found


def inputs(heads: tuple[int, int], q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, heads[0], q_len, 4), torch.zeros(2, heads[1], kv_len, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_budgets(length: int, kind: str) -> None:
    q, k = inputs((4, 2), length, length)
    for heads, q_block, offset in ((1, 7, None), (2, 16, torch.tensor([0, -3])), (4, 64, None)):
        grid = fs.Grid(length, length, q_offset=offset, batch=2)
        rows, blocks = grid.shape(q_block, 5)
        given = scores(kind, (2, heads, rows, blocks))
        want = rowwise(given, grid, (q_block, 5))
        # One budget for all, and one a head in three forms.
        forms: list[Any] = [*BUDGETS, tuple(BUDGETS[1 : 1 + heads]), tuple(BUDGETS[-heads:])]
        forms += [torch.arange(1, heads + 1), torch.linspace(0.2, 0.8, heads)]
        for keep in forms:
            chosen = Given(given=given, keep=keep, block=5, q_block=q_block).select(
                q, k, grid, Causal()
            )
            each = keep.tolist() if isinstance(keep, Tensor) else keep
            each = list(each) if isinstance(each, list | tuple) else [each] * heads
            for b, lists in enumerate(sets(chosen)):
                for h, found in enumerate(lists):
                    for r, row in enumerate(found):
                        score = want[b][h][r]
                        assert row == set(kept(score, each[h], exponentials(score)))
                        assert bool(row) == bool(score)


@pytest.mark.parametrize("keep", BUDGETS)
def test_forced_blocks_come_first(keep: Any) -> None:
    q, k = inputs((2, 2), 65, 65)
    grid = fs.Grid(65, 65, batch=2)
    given = scores("random", (2, 2, 9, 9))
    chosen = Given(given=given, keep=keep, block=8, q_block=8, own=True).select(
        q, k, grid, Causal()
    )
    want = rowwise(given, grid, (8, 8))
    for b, lists in enumerate(sets(chosen)):
        for h, found in enumerate(lists):
            for r, row in enumerate(found):
                score = want[b][h][r]
                assert row == set(kept(score, keep, exponentials(score), {0, r}))


GALLERY: dict[str, Any] = {
    "moba": lambda keep: MoBA(block=8, keep=keep, q_block=8),
    "msa": lambda keep: MSA(block=8, keep=keep, q_block=8),
    "nsa": lambda keep: NSA(length=4, stride=4, block=8, keep=keep, q_block=8),
    "infllm": lambda keep: InfLLMv2(
        length=4, stride=4, block=8, keep=keep, q_block=8, local=1, dense_len=0
    ),
    "block sparse": lambda keep: BlockSparse(block=8, keep=keep, q_block=8),
    "quest": lambda keep: Quest(block=8, keep=keep, q_block=8),
}


@pytest.mark.parametrize("name", GALLERY)
@pytest.mark.parametrize("keep", [2, 0.4, Mass(0.8), (1, Mass(0.6))])
def test_every_selector_of_scores_takes_every_budget(name: str, keep: Any) -> None:
    """Their scores ranked and counted one row after the other; of NSA and InfLLM these are mass itself."""
    draw = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 2, 65, 16, generator=draw) for _ in range(2))
    grid, selector = fs.Grid(65, 65), GALLERY[name](keep)
    given = selector.score(q, k, grid)
    forced = selector.forced(grid, q.device)
    want = rowwise(given, grid, (8, 8))
    each = keep if isinstance(keep, tuple) else (keep, keep)
    for h, found in enumerate(sets(selector.select(q, k, grid, Causal()))[0]):
        for r, row in enumerate(found):
            score = want[0][h][r]
            mass = score if name in ("nsa", "infllm") else exponentials(score)
            must = set() if forced is None else set(forced[0, 0, r].nonzero()[:, 0].tolist())
            assert row == set(kept(score, each[h], mass, must)), (h, r)


def test_the_width_of_lists_is_known_without_looking() -> None:
    q, k = inputs((2, 2), 64, 64)
    grid = fs.Grid(64, 64, batch=2)
    for keep, width in (
        (3, 3), (100, 16), (0.3, 5), (Mass(0.1), 16), (Mass(0.9, most=6), 6), ((2, 0.5), 8)
    ):  # fmt: skip
        selector = Given(given=torch.zeros(2, 2, 16, 16), keep=keep, block=4, q_block=4)
        assert selector.select(q, k, grid, Causal()).indices.shape[-1] == width


def test_mass_of_scores_that_are_mass() -> None:
    """An oracle's scores are attention already; a share of them is one of the attention itself."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 64, 16, generator=draw) * 2 for _ in range(2))
    grid = fs.Grid(64, 64)
    weights = (q.double() @ k.double().mT / 4).masked_fill(
        ~torch.ones(64, 64).tril().bool(), -torch.inf
    )
    weights = weights.softmax(-1)
    sizes = []
    for share in (0.5, 0.9):
        chosen = OracleTopP(keep=Mass(share), block=1, q_block=1).select(q, k, grid, Causal())
        inside = weights.masked_fill(~chosen.dense(), 0)
        assert bool((inside.sum(-1) >= share - 1e-6).all())
        # One key less holds less than the share.
        least = inside.masked_fill(~chosen.dense(), 2).amin(-1)
        assert bool((inside.sum(-1) - least < share + 1e-6).all())
        sizes.append(int(chosen.counts.sum()))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contiguity", [0.0, 0.4])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_a_budget_of_tiles(length: int, contiguity: float, kind: str) -> None:
    q, k = inputs((2, 2), length, length)
    grid = fs.Grid(length, length, batch=2)
    rows, blocks = grid.shape(4, 4)
    given = scores(kind, (2, 2, rows, blocks))
    every = rowwise(given, grid, (4, 4))
    for most, kv_tile, keep in ((1, 4, 2), (2, 16, 3), (3, 8, 0.4), (100, 8, 3)):
        tiles = Tiles(q_tile=16, kv_tile=kv_tile, most=most, each=keep, contiguity=contiguity)
        selector = Given(given=given, keep=tiles, block=4, q_block=4)
        chosen = sets(selector.select(q, k, grid, Causal()))
        for b in range(2):
            for h in range(2):
                for start in range(0, rows, 4):
                    score = every[b][h][start : start + 4]
                    budgets = [len(kept(s, keep, {})) for s in score]
                    assert chosen[b][h][start : start + 4] == walked(score, budgets, tiles, 4)


def test_what_a_budget_of_tiles_costs() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 256, 16, generator=draw) for _ in range(2))
    grid = fs.Grid(256, 256)
    free = OracleTopK(block=4, q_block=4, keep=8)
    wanted = free.select(q, k, grid, Causal())
    held, touched = [], []
    for most in (2, 4, 16):
        tiles = Tiles(q_tile=32, kv_tile=16, most=most, each=8)
        tight = OracleTopK(block=4, q_block=4, keep=tiles)
        chosen = tight.select(q, k, grid, Causal())
        held.append(float(recall(chosen, wanted).mean()))
        layout = fs.build_layout(
            rule=Causal(), select=chosen, grid=grid, heads=(2, 2), block_size=(32, 16)
        )
        touched.append(layout.budget().physical_tiles)
    assert held == sorted(held) and held[0] < 0.9 and held[2] == 1
    assert touched == sorted(touched) and touched[0] < touched[2]


def test_recall_counts_what_is_wanted() -> None:
    make = fs.Selection.from_indices
    a = make(torch.tensor([[[[0, 1, -1], [2, 3, 4]]]]), kv_len=9, q_len=2)
    b = make(torch.tensor([[[[-1, -1, -1], [3, 4, 5]]]]), kv_len=9, q_len=2)
    torch.testing.assert_close(recall(a, b), torch.tensor([[[1.0, 2 / 3]]]))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Quest(keep=0), "Quest keep must be an int of at least 1.*got 0"),
        (lambda: Quest(keep=1.5), "a fraction between 0 and 1.*got 1.5"),
        (lambda: Quest(keep=(4, True)), "for each head, got True"),
        (lambda: Quest(keep=()), "for each head, got none"),
        (lambda: Quest(keep=torch.ones(2, 2)), r"tensor \[H\], got torch.float32\[2, 2\]"),
        (lambda: Mass(1.0), "Mass share must be a number between 0 and 1, got 1.0"),
        (lambda: Mass(0.9, least=0), "Mass least must be an int of at least 1, got 0"),
        (lambda: Mass(0.9, least=4, most=2), "at least its least 4, got 2"),
        (lambda: Tiles(64, 64, 0), "Tiles most must be an int of at least 1, got 0"),
        (lambda: Tiles(64, 64, 1, contiguity=-1.0), "Tiles contiguity"),
        (lambda: Quest(keep=Tiles(96, 64, 1)), "keep.q_tile must be a multiple of q_block"),
        (lambda: Tiles(64, 64, 1, each=0), "Tiles keep must be an int of at least 1.*got 0"),
        (
            lambda: Quest(keep=(1, 2, 3)).select(*inputs((4, 2), 8, 8), fs.Grid(8, 8, batch=2)),
            "3 budgets, one a head, but selects for 2 heads",
        ),
    ],
)
def test_wrong_budgets(wrong: Any, words: str) -> None:
    with pytest.raises(fs.FlexSparseError, match=words):
        wrong()


def test_budgets_in_a_configuration() -> None:
    from flexsparse.experiment.build import build_selector
    from flexsparse.experiment.source import Source

    source = Source("", None)

    def built(**arguments: Any) -> Any:
        return build_selector({"quest": arguments}, (), source)

    assert built(keep=0.25).keep == 0.25
    assert built(keep={"share": 0.9, "most": 8}).keep == Mass(0.9, most=8)
    assert built(keep=[4, 8]).keep == (4, 8)
    tiles = {"q_tile": 128, "kv_tile": 64, "most": 9}
    assert built(keep=tiles).keep == Tiles(**tiles)
    assert built(keep=tiles | {"each": {"share": 0.5}}).keep.each == Mass(0.5)
    assert not source.problems
    assert built(keep={"share": 2}) is None and source.problems
