"""Wrong arguments of the gallery: one sentence with the rule's name, the argument's, and what was given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flexsparse as fs
import flexsparse.masks
from flexsparse.masks import (
    Alibi,
    AShape,
    AttentionSink,
    BigBird,
    BlockDiagonal,
    Causal,
    Dilated,
    Document,
    Fixed,
    FixedColumn,
    FixedLocal,
    GlobalTokens,
    HeadBias,
    LeftPadding,
    LogLength,
    Multimodal,
    Neighborhood,
    PerHead,
    PrefixLM,
    RightPadding,
    ShiftedWindow,
    SlidingTile,
    SlidingWindow,
    Softcap,
    Strided,
    StridedColumn,
    StridedLocal,
    SwinBias,
    T5Bias,
    Temperature,
    Tree,
    VerticalSlash,
)

at = torch.tensor
no = torch.zeros
seen = torch.zeros(3, 3, dtype=torch.bool)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: SlidingWindow(0), "SlidingWindow size must be at least 1, got 0"),
    (lambda: SlidingWindow(-1), "SlidingWindow size must be at least 1, got -1"),
    (lambda: SlidingWindow(2.0), "SlidingWindow size must be an int, got 2.0"),
    (lambda: AttentionSink(0), "AttentionSink size must be at least 1"),
    (lambda: PrefixLM(-1), "PrefixLM prefix must be at least 0"),
    (lambda: PrefixLM(ints(2, 2)), "PrefixLM prefix must be an int or an int tensor [B]"),
    (lambda: PrefixLM(no(2)), "PrefixLM prefix must be an int or an int tensor [B]"),
    (lambda: Document(no(4)), "Document document_of must be an int tensor"),
    (lambda: Document(ints(1, 1, 4)), "Document document_of must be"),
    (lambda: Document([0, 0, 1]), "Document document_of must be an int tensor"),
    (lambda: LeftPadding(at(3)), "LeftPadding padding must be"),
    (lambda: LeftPadding(at([1.0])), "LeftPadding padding must be an int tensor"),
    (lambda: LeftPadding(3), "LeftPadding padding must be an int tensor"),
    (lambda: RightPadding(at(3)), "RightPadding lengths must be"),
    (lambda: RightPadding(at([1.0])), "RightPadding lengths must be an int tensor"),
    (lambda: RightPadding([3]), "RightPadding lengths must be an int tensor"),
    (lambda: Alibi([0.5]), "Alibi slopes must be a float tensor [Hq]"),
    (lambda: Alibi(at([1, 2])), "Alibi slopes must be a float tensor [Hq]"),
    (lambda: Alibi(no(2, 2)), "Alibi slopes must be a float tensor [Hq]"),
    (lambda: HeadBias(no(4)), "HeadBias bias must be a float tensor [Hq, distances]"),
    (lambda: HeadBias(ints(4, 4)), "HeadBias bias must be a float tensor [Hq, distances]"),
    (lambda: Softcap(0.0), "Softcap cap must be positive"),
    (lambda: Softcap(-1.0), "Softcap cap must be positive"),
    (lambda: Softcap(float("nan")), "Softcap cap must be positive"),
    (lambda: Dilated(0, 1), "Dilated size must be at least 1, got 0"),
    (lambda: Dilated(3, 0), "Dilated dilation must be at least 1, got 0"),
    (lambda: Dilated(3, 1, -1), "Dilated ahead must be at least 0, got -1"),
    (lambda: Dilated(3, at([2, 0])), "Dilated dilation must be at least 1, got 0"),
    (lambda: Dilated(3, at([2.0])), "Dilated dilation must be an int tensor [Hq], got torch.float32[1]"),
    (lambda: Dilated(3, [2]), "Dilated dilation must be an int, got [2]"),
    (lambda: GlobalTokens(ints(4)), "GlobalTokens is_global must be a bool tensor [kv_len] or [B, kv_len], got torch.int64[4]"),
    (lambda: GlobalTokens(4), "GlobalTokens is_global must be a bool tensor"),
    (lambda: BigBird(ints(2, 2)), "BigBird random must be a bool tensor [R, R] or [Hq, R, R]"),
    (lambda: BigBird(seen[:2]), "BigBird random must have as many query blocks as key blocks"),
    (lambda: BigBird(seen, block=0), "BigBird block must be at least 1"),
    (lambda: BigBird(seen, window=2), "BigBird window must be odd, got 2"),
    (lambda: BigBird.drawn(0), "BigBird kv_len must be at least 1"),
    (lambda: BigBird.drawn(9, random=-1), "BigBird random must be at least 0"),
    (lambda: BigBird.drawn(9, heads=0), "BigBird heads must be at least 1"),
    (lambda: BlockDiagonal(0), "BlockDiagonal block must be at least 1"),
    (lambda: AShape(-1, 3), "AShape sink must be at least 0"),
    (lambda: AShape(1, 0), "AShape window must be at least 1"),
    (lambda: VerticalSlash(seen, at([1])), "VerticalSlash slash must be a bool tensor"),
    (lambda: VerticalSlash.of_indices(at([[0, 9]]), at([[0]]), 9), "VerticalSlash vertical must lie in 0..8, or be -1 for none, got 9"),
    (lambda: VerticalSlash.of_indices(at([[0]]), at([[-2]]), 9), "VerticalSlash slash must lie in 0..8"),
    (lambda: VerticalSlash.of_indices(at([0]), at([[0]]), 9), "VerticalSlash vertical must be an int tensor [Hq, n] or [B, Hq, n], got torch.int64[1]"),
    (lambda: StridedLocal(0), "StridedLocal stride must be at least 1"),
    (lambda: StridedColumn(0), "StridedColumn stride must be at least 1"),
    (lambda: Strided(1.5), "Strided stride must be an int, got 1.5"),
    (lambda: FixedLocal(0), "FixedLocal block must be at least 1"),
    (lambda: FixedColumn(4, 0), "FixedColumn cells must be at least 1"),
    (lambda: Fixed(4, 5), "Fixed cells must be at most block, got 5 and 4"),
    (lambda: Neighborhood((4, 4), (3,)), "Neighborhood kernel must be a tuple of 2 ints, one an axis, got (3,)"),
    (lambda: Neighborhood(16, (3,)), "Neighborhood canvas must be a tuple of 1 to 3 ints, one an axis, got 16"),
    (lambda: Neighborhood((4, 4), (3, 5)), "Neighborhood kernel times dilation must fit into the canvas, got (3, 5) times (1, 1) in (4, 4)"),
    (lambda: Neighborhood((4, 4), (3, 3), (1, 2)), "Neighborhood kernel times dilation must fit"),
    (lambda: Neighborhood((4, 4), (3, 3), (1, 0)), "Neighborhood dilation must be at least 1 along each axis, got (1, 0)"),
    (lambda: SlidingTile((4, 6), (2, 4), (1, 1)), "SlidingTile tile must divide the canvas, got (2, 4) in (4, 6)"),
    (lambda: SlidingTile((4, 6), (2, 2), (1, 4)), "SlidingTile window must fit into the canvas"),
    (lambda: ShiftedWindow((4, 4), (2, 2), (0, 2)), "ShiftedWindow shift must be less than the window"),
    (lambda: ShiftedWindow((4, 4), (2, 2), (0, -1)), "ShiftedWindow shift must be at least 0"),
    (lambda: ShiftedWindow((4, 4), (2, True)), "ShiftedWindow window must be a tuple of 2 ints"),
    (lambda: Tree(seen[:2], 0), "Tree ancestors must be square and not empty, got [2, 3]"),
    (lambda: Tree(seen, -1), "Tree start must be at least 0"),
    (lambda: Tree(seen, at([1.0])), "Tree start must be an int tensor [B], got torch.float32[1]"),
    (lambda: Tree.of_parents(at([0]), 0), "Tree parents must be -1 or the index of an earlier token"),
    (lambda: Tree.of_parents(at([-1, -2]), 0), "Tree parents must be -1 or the index of an earlier"),
    (lambda: Tree.of_parents([-1, 0], 0), "Tree parents must be an int tensor [N] or [B, N], got the list [-1, 0]"),
    (lambda: Multimodal(no(3)), "Multimodal image_of must be an int tensor [kv_len] or [B, kv_len]"),
    (lambda: PerHead(()), "PerHead rules must be a tuple of rules, got ()"),
    (lambda: PerHead(Causal()), "PerHead rules must be a tuple of rules, got Causal()"),
    (lambda: PerHead((Causal,)), "PerHead rules must be rules"),
    (lambda: PerHead((Causal(),), at([0, 1])), "PerHead rule_of must lie in 0..0, got 1"),
    (lambda: PerHead((Causal(),), [0]), "PerHead rule_of must be an int tensor [Hq], got the list [0]"),
    (lambda: T5Bias(no(4), True), "T5Bias bias must be a float tensor [Hq, buckets]"),
    (lambda: T5Bias(no(4, 8), 1), "T5Bias bidirectional must be true or false, got 1"),
    (lambda: T5Bias(no(4, 8), False, 4), "T5Bias needs two buckets a direction and a max_distance beyond"),
    (lambda: T5Bias(no(4, 3), True), "T5Bias needs two buckets a direction"),
    (lambda: SwinBias(no(4, 3, 3), (4,)), "SwinBias canvas must be a tuple of 2 ints"),
    (lambda: SwinBias(no(4, 4), (4,)), "SwinBias bias must have 2M-1 entries along each axis"),
    (lambda: SwinBias(no(9), (4,)), "SwinBias bias must be a float tensor [Hq, 2M-1] or"),
    (lambda: Temperature(0.0), "Temperature temperature must be positive, got 0.0"),
    (lambda: Temperature(at([1.0, -1.0])), "Temperature temperature must be positive, got -1.0"),
    (lambda: Temperature(no(2, 2)), "Temperature temperature must be a float tensor [Hq]"),
    (lambda: LogLength("1"), "LogLength factor must be a number, got '1'"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_a_wrong_argument_is_one_sentence(wrong: Callable[[], object], words: str) -> None:
    """Not deep inside a kernel, and not silently."""
    with pytest.raises(fs.FlexSparseError) as caught:
        wrong()
    said = str(caught.value)
    assert said.startswith(words) and "\n" not in said and len(said) < 160


def test_every_rule_with_arguments_refuses_some() -> None:
    spoken = {words.split()[0] for _, words in WRONG}
    assert spoken == set(flexsparse.masks.__all__) - {"Causal"}
