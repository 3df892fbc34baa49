"""What each way to run a call would take, and which is chosen, on the figures of one box."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse import ways as weighing
from flexsparse.address import Identity
from flexsparse.backends import Call, flash
from flexsparse.choice import unpacked
from flexsparse.cost import Tiles, dense_ms, gathered_ms, tiled_ms
from flexsparse.device import Ceilings
from flexsparse.errors import BackendError
from flexsparse.grid import Grid
from flexsparse.masks import Causal, Neighborhood, SlidingWindow
from flexsparse.program import mask_program, score_program
from flexsparse.rules import as_rule
from flexsparse.ways import Way, ways

BOX = Ceilings(4.24e12, 795e12, 132)
DIMS = (128, 128)
# Tiles of 128 x 128 of 16 blocks for each 128 queries, 32 heads, and ms measured: configs/bench/RESULTS.md.
# The rule cuts the own block of each 128 queries.
TOP_K = {
    length: Tiles(pairs / 128**2, 128, 128, partial=32 * length / 128)
    for length, pairs in ((16384, 1.011e9), (32768, 2.085e9))
}


@pytest.mark.parametrize(
    ("predicted", "measured"),
    [
        (tiled_ms(TOP_K[32768], "flash", DIMS, BOX, grads=False), 1.85),
        (tiled_ms(TOP_K[32768], "flash", DIMS, BOX, grads=True), 7.6),
        (tiled_ms(TOP_K[16384], "flash", DIMS, BOX, grads=False), 0.832),
        (tiled_ms(TOP_K[16384], "flash", DIMS, BOX, grads=True), 3.96),
        (tiled_ms(TOP_K[32768], "flex", DIMS, BOX, grads=False), 2.65),
        (tiled_ms(TOP_K[32768], "flex", DIMS, BOX, grads=True), 10.2),
        (tiled_ms(TOP_K[16384], "flex", DIMS, BOX, grads=True), 5.2),
        (dense_ms(32 * 32768**2 / 2, DIMS, BOX, grads=False), 14.6),
        (dense_ms(32 * 32768**2 / 2, DIMS, BOX, grads=True), 53.0),
        # 16 of 256 blocks of 64 for each token, 16 heads a KV head, as (tiles, how many of them differ).
        (tiled_ms(Tiles(1017856, 16, 64, None, 64), "flex", DIMS, BOX, grads=False), 3.92),
        (tiled_ms(Tiles(2066432, 16, 64, None, 64), "flex", DIMS, BOX, grads=False), 7.96),
        (tiled_ms(Tiles(508928, 32, 64, 0, 64), "flex", DIMS, BOX, grads=False), 2.92),
        (tiled_ms(Tiles(254464, 64, 64, 0, 64), "flex", DIMS, BOX, grads=False), 2.33),
        (tiled_ms(Tiles(433753, 64, 64, 404865, 64), "flex", DIMS, BOX, grads=False), 4.89),
        (tiled_ms(Tiles(127232, 128, 64, 0, 64), "flex", DIMS, BOX, grads=False), 2.20),
        (tiled_ms(Tiles(258304, 128, 64, 0, 64), "flex", DIMS, BOX, grads=False), 4.59),
        (tiled_ms(Tiles(361744, 128, 64, 347363, 64), "flex", DIMS, BOX, grads=False), 7.91),
        (tiled_ms(Tiles(254464, 64, 64, None, 64), "flex", DIMS, BOX, grads=False), 1.65),
        (
            tiled_ms(
                Tiles(1928 * 32, 128, 128, 1928 * 32, spread=True), "flex", DIMS, BOX, grads=False
            ),
            1.56,
        ),
        (gathered_ms(2**24, 1, 128, DIMS, 2, BOX, grads=False), 5.45),
        (gathered_ms(2**24, 1, 128, DIMS, 2, BOX, grads=True), 20.4),
        (gathered_ms(2**24, 1, 64, DIMS, 2, BOX, grads=False), 3.31),
        (gathered_ms(2**24, 1, 64, DIMS, 2, BOX, grads=True), 15.5),
        (gathered_ms(2**27, 1, 4, DIMS, 2, BOX, grads=False), 14.9),
        (gathered_ms(2**27, 1, 4, DIMS, 2, BOX, grads=True), 58.1),
        (gathered_ms(2**26, 64, 16, DIMS, 2, BOX, grads=False), 5.40),
        (gathered_ms(2**26, 64, 16, DIMS, 2, BOX, grads=True), 18.7),
    ],
)
def test_the_model_gives_what_was_measured(predicted: float, measured: float) -> None:
    assert abs(predicted / measured - 1) <= 0.25


def weigh(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], lengths: tuple[int, int],
    *, indices: Tensor | None = None, blocks: tuple[int, int] = (1, 1), rule: Any = None,
    score: Any = None, grads: bool = False, has_flash: bool = True, lse: bool = False, **asked: Any,
) -> list[Way]:  # fmt: skip
    """The ways of a call on a box of these ceilings."""
    monkeypatch.setattr(weighing, "ceilings", lambda device, dtype: BOX)
    if has_flash:
        monkeypatch.setattr(flash, "refuses", lambda call: None)
    q_len, kv_len = lengths
    grid = Grid(q_len, kv_len)
    select = None
    if indices is not None:
        select = fs.Selection.from_indices(
            indices, q_len=q_len, kv_len=kv_len, q_block=blocks[0], kv_block=blocks[1]
        )
    shapes = [(1, heads[0], q_len, 128)] + 2 * [(1, heads[1], kv_len, 128)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    address = Identity(*heads)
    program = mask_program(address, grid, None if rule is None else as_rule(rule), select, None)
    scored = score_program(address, grid, None if score is None else fs.ScoreRule.of(score))
    call = Call(
        torch.device("cpu"), torch.bfloat16, 128, 128, q_len, grads, lse, False, program, scored
    )
    found = ways((q, k, v), call, select, grid, unpacked(q, k, v, select), **asked)
    assert found == sorted(found)
    return found


def nsa(shared: int, length: int = 4096) -> Tensor:
    """Blocks of 64 for each of 4 KV heads: first, own and random past ones, the same for neighbours."""
    draw = torch.Generator().manual_seed(0)
    own = torch.arange(0, length, shared) // 64
    past = (torch.rand(1, 4, len(own), 14, generator=draw) * (own[:, None] + 1)).long()
    own = own.expand(1, 4, -1)[..., None]
    return torch.cat([torch.zeros_like(own), own, past], -1).repeat_interleave(shared, 2)


@pytest.mark.parametrize(
    ("shared", "laid"),
    [(1, ("pack", 16)), (2, ("pack", 32)), (8, ("pack", 128)), (64, ("fold", 64))],
)
def test_packing_is_as_tall_as_neighbours_agree(
    shared: int, laid: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tile of single heads holds queries that all select the same, nothing is packed."""
    best = weigh(
        monkeypatch, (64, 4), (4096, 4096), indices=nsa(shared), blocks=(1, 64), rule=Causal(),
        has_flash=False,
    )[0]  # fmt: skip
    assert (best.backend, best.pack, best.tile[0]) == ("flex", *laid)


def test_the_first_block_of_everybody_is_one_programs_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward a kernel walks a column alone; who gathers adds to it from everywhere."""
    found = weigh(
        monkeypatch, (64, 4), (4096, 4096), indices=nsa(8), blocks=(1, 64), rule=Causal(),
        has_flash=False, grads=True,
    )  # fmt: skip
    assert found[0].backend == "gather"


def test_scattered_keys_of_many_heads_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 4096, (1, 1, 4096, 128), generator=draw)
    found = weigh(monkeypatch, (64, 1), (4096, 4096), indices=indices, rule=Causal())
    assert found[0].backend == "gather"
    score = weigh(
        monkeypatch, (64, 1), (4096, 4096), indices=indices, rule=Causal(),
        score=lambda s, b, h, q, k: s * 2,
    )  # fmt: skip
    assert all(way.backend != "gather" for way in score)


def test_blocks_go_to_the_fastest_kernel_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.arange(4).expand(1, 8, 64, 4)
    call: Any = {"indices": indices, "blocks": (128, 128), "rule": Causal()}
    assert weigh(monkeypatch, (32, 8), (8192, 8192), **call, has_flash=False)[0].backend == "flex"
    best = weigh(monkeypatch, (32, 8), (8192, 8192), **call)[0]
    assert (best.backend, best.pack, best.tile) == ("flash", "fold", (128, 128))


def test_dense_wins_where_nothing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    square: Any = ((32, 8), (8192, 8192))
    for rule in (None, Causal(), lambda b, h, q, kv: q >= kv):
        assert weigh(monkeypatch, *square, rule=rule, has_flash=False)[0].backend == "dense"
    assert weigh(monkeypatch, *square, rule=SlidingWindow(9)) == []
    assert weigh(monkeypatch, *square, rule=Causal(), lse=True) == []


def test_what_is_asked_for_is_all_that_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    call: Any = {"indices": nsa(8), "blocks": (1, 64), "rule": Causal()}
    lengths: Any = ((64, 4), (4096, 4096))
    packed = weigh(monkeypatch, *lengths, **call, pack="pack")
    assert packed and all(way.pack == "pack" for way in packed)
    fold = weigh(monkeypatch, *lengths, **call, pack="fold")
    assert fold and all(way.pack == "fold" for way in fold)
    tile = weigh(monkeypatch, *lengths, **call, tile=(64, 64))
    assert tile and all(way.tile == (64, 64) for way in tile)


def test_a_way_says_what_it_is() -> None:
    assert str(Way(1.234, "flash", "pack", (128, 64))) == "flash over 128x64, heads packed: 1.23 ms"
    assert str(Way(12.34, "gather", "fold", (128, 128))) == "gather: 12.3 ms"


def test_the_two_best_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsparse import planning, quicker

    both = [Way(1.0, "tiles", "identity", (64, 64)), Way(2.0, "gather", "identity", (64, 64))]
    monkeypatch.setattr(planning, "weighs", lambda call: True)
    monkeypatch.setattr(planning, "ways", lambda *args, **kwargs: both)
    # What is to be known of a backend beside its speed is said here too.
    monkeypatch.setattr(planning, "remarks", lambda backend, call: [f"{backend.name} is known"])
    asked: list[str] = []

    def took(call: Any, device: torch.device) -> float:
        call()
        asked.append("timed")
        return {1: 7.0, 2: 3.0}[len(asked)]

    monkeypatch.setattr(quicker, "device_ms", took)
    q = torch.randn(1, 2, 65, 16, requires_grad=True)
    k, v = torch.randn(2, 1, 2, 65, 16)
    indices = torch.randint(0, 65, (1, 1, 65, 9), generator=torch.Generator().manual_seed(0))
    select = fs.Selection.from_indices(indices, kv_len=65, q_len=65)
    options: Any = {"rule": Causal(), "select": select, "backend": "measured"}
    for _ in range(2):
        plan = fs.make_plan(q, k, v, **options)
        assert plan.backend == "gather" and len(asked) == 2
        assert "3 ms measured" in plan.reasons[0] and "7 ms measured" in plan.reasons[1]
        assert plan.reasons[2:] == ("gather is known",)
    close = fs.reference(q, k, v, rule=Causal(), select=select).out
    torch.testing.assert_close(plan.run(q, k, v).out.double(), close, atol=1e-5, rtol=0)


def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    q = k = v = torch.zeros(1, 1, 4, 16)
    with pytest.raises(BackendError, match="times kernels on CUDA"):
        fs.attention(q, k, v, backend="measured")


def test_a_full_device_is_not_weighed_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsparse import planning

    def full(*args: Any, **kwargs: Any) -> list[Way]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(planning, "weighs", lambda call: True)
    monkeypatch.setattr(planning, "ways", full)
    q = k = v = torch.zeros(1, 1, 200, 16)
    plan = fs.make_plan(q, k, v, rule=Causal())
    assert plan.backend == "tiles" and "no memory is left" in plan.reasons[0]


def test_blocks_of_64_for_each_head_are_visited_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list for each query head packs none: tiles of 128 keys would take 2.3 times as long as of 64."""
    draw = torch.Generator().manual_seed(0)
    own = torch.arange(128)[:, None]
    past = (torch.rand(1, 32, 128, 24, generator=draw) * (own + 1)).long()
    found = weigh(
        monkeypatch, (32, 8), (8192, 8192), indices=past, blocks=(64, 64), rule=Causal(),
        has_flash=False,
    )  # fmt: skip
    assert found[0].backend == "flex"
    assert found[0].tile[1] == 64
    assert {(64, 64), (128, 64), (128, 128)} <= {way.tile for way in found}


def test_heights_are_no_shorter_than_rows_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.arange(4).expand(1, 8, 64, 4)
    found = weigh(
        monkeypatch, (8, 8), (8192, 8192), indices=indices, blocks=(128, 128), has_flash=False
    )
    assert {way.tile for way in found if way.backend == "flex"} == {(128, 128)}


def test_nobody_waits_minutes_for_a_kernel_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Neighborhood(canvas=(64, 64), kernel=(13, 13))
    found = weigh(
        monkeypatch, (8, 8), (4096, 4096), indices=torch.arange(4).expand(1, 8, 32, 4),
        blocks=(128, 128), rule=image,
    )  # fmt: skip
    assert found[0].backend == "flex"
    assert all(way.backend != "flash" for way in found)
