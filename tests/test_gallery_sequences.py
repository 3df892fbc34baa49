"""Rules on a sequence, against their papers' definitions: windows, blocks, columns, trees, mixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import BATCH, HEADS, SIZES, Pair
from rule_checks import allows, attends

import flexsparse as fs
from flexsparse.errors import RuleError
from flexsparse.masks import (
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
    Multimodal,
    PerHead,
    SlidingWindow,
    Strided,
    StridedColumn,
    StridedLocal,
    Tree,
    VerticalSlash,
)

Case = tuple[fs.MaskRule, Pair]
each = torch.tensor


def dilated(size: int) -> Case:
    def pair(b: int, h: int, i: int, j: int) -> bool:
        return j in [i - 3 * n for n in range(5)]

    return Dilated(5, 3), pair


def longformer(size: int) -> Case:
    """Window w = 8 with gaps of 2, w / 2 on each side; and two global tokens."""
    chosen = {0, size // 2}

    def pair(b: int, h: int, i: int, j: int) -> bool:
        return j in [i + 2 * n for n in range(-4, 5)] or bool(chosen & {i, j})

    is_global = each([i in chosen for i in range(size)])
    return Dilated(5, 2, ahead=4) | GlobalTokens(is_global), pair


def dilated_heads(size: int) -> Case:
    sizes, steps, ahead = [1, 4, 2, 9], [1, 2, 5, 3], [0, 1, 3, 0]

    def pair(b: int, h: int, i: int, j: int) -> bool:
        return j in [i + steps[h] * n for n in range(1 - sizes[h], ahead[h] + 1)]

    return Dilated(each(sizes), each(steps), each(ahead, dtype=torch.int32)), pair


def global_batches(size: int) -> Case:
    chosen = [[(i + b) % (7 + b) == 0 for i in range(size)] for b in range(BATCH)]
    return GlobalTokens(each(chosen)), lambda b, h, i, j: chosen[b][i] or chosen[b][j]


def bigbird(heads: int | None, block: int, window: int) -> Callable[[int], Case]:
    def make(size: int) -> Case:
        rule = BigBird.drawn(size, block, window, random=2, heads=heads, seed=3)
        blocks = (size + block - 1) // block
        table = rule.random.tolist()

        def pair(b: int, h: int, i: int, j: int) -> bool:
            row, column = i // block, j // block
            ends = (0, blocks - 1)
            around = range(row - (window - 1) // 2, row + (window - 1) // 2 + 1)
            drawn = table if heads is None else table[h]
            return row in ends or column in ends or column in around or drawn[row][column]

        return rule, pair

    return make


def block_diagonal(size: int) -> Case:
    return BlockDiagonal(9), lambda b, h, i, j: j in range(i - i % 9, i - i % 9 + 9)


def block_heads(size: int) -> Case:
    of = [1, 5, 64, 300]
    return BlockDiagonal(each(of)), lambda b, h, i, j: i // of[h] == j // of[h]


def a_shape(size: int) -> Case:
    return AShape(3, 6), lambda b, h, i, j: j <= i and (j in (0, 1, 2) or j > i - 6)


def a_shape_heads(size: int) -> Case:
    sink, near = [0, 1, 5, 2], [4, 1, 30, 500]
    rule = AShape(each(sink), each(near))
    return rule, lambda b, h, i, j: j <= i and (j < sink[h] or i - j < near[h])


def vertical_slash(size: int) -> Case:
    columns = [[0, size // 3], [size - 1, size - 1], [0, 0], [size // 2, 0]]
    offsets = [[0], [size // 2], [0], [size - 1]]
    rule = VerticalSlash.of_indices(each([c + [-1] for c in columns]), each(offsets), size)
    return rule, lambda b, h, i, j: j <= i and (j in columns[h] or i - j in offsets[h])


def vertical_slash_batches(size: int) -> Case:
    columns = [[[(3 * b + 5 * h) % size] for h in range(HEADS)] for b in range(BATCH)]
    offsets = [[[b % size, (h * 11) % size] for h in range(HEADS)] for b in range(BATCH)]
    rule = VerticalSlash.of_indices(each(columns, dtype=torch.int32), each(offsets), size)
    return rule, lambda b, h, i, j: j <= i and (j in columns[b][h] or i - j in offsets[b][h])


def strided_local(size: int) -> Case:
    return StridedLocal(8), lambda b, h, i, j: j in range(max(0, i - 8), i + 1)


def strided_column(size: int) -> Case:
    return StridedColumn(8), lambda b, h, i, j: j <= i and (i - j) % 8 == 0


def strided(size: int) -> Case:
    first, second = strided_local(size)[1], strided_column(size)[1]
    return Strided(8), lambda b, h, i, j: first(b, h, i, j) or second(b, h, i, j)


def fixed_local(size: int) -> Case:
    return FixedLocal(8), lambda b, h, i, j: j <= i and i // 8 == j // 8


def fixed_column(size: int) -> Case:
    return FixedColumn(8, 3), lambda b, h, i, j: j <= i and j % 8 in range(8 - 3, 8 + 1)


def fixed(size: int) -> Case:
    first, second = fixed_local(size)[1], fixed_column(size)[1]
    return Fixed(8, 3), lambda b, h, i, j: first(b, h, i, j) or second(b, h, i, j)


def sparse_transformer(size: int) -> Case:
    """Its two kinds of heads in turn."""
    kinds = [strided_local(size)[1], strided_column(size)[1]]
    return PerHead((StridedLocal(8), StridedColumn(8))), lambda b, h, i, j: kinds[h % 2](b, h, i, j)


def drafted(parents: list[int], at: int, of: int) -> bool:
    """Whether ``of`` is ``at`` or above it."""
    while at != -1 and at != of:
        at = parents[at]
    return at == of


def tree(size: int) -> Case:
    nodes = (size + 1) // 2
    parents = [(i - 1) // 2 if i % 5 else -1 for i in range(nodes)]
    start = size - nodes

    def pair(b: int, h: int, i: int, j: int) -> bool:
        if i < start or j < start:
            return j <= i
        return drafted(parents, i - start, j - start)

    return Tree.of_parents(each(parents), start), pair


def tree_batches(size: int) -> Case:
    """Trees and prefixes of each sequence's own; a shorter one leaves positions past its tree."""
    nodes = (size + 2) // 3
    parents = [[max(i - 1 - b, -1) for i in range(nodes)] for b in range(BATCH)]
    starts = [0, size - nodes, size // 3]

    def pair(b: int, h: int, i: int, j: int) -> bool:
        row, column = i - starts[b], j - starts[b]
        if row >= nodes or column >= nodes:
            return False
        if row < 0 or column < 0:
            return j <= i
        return drafted(parents[b], row, column)

    return Tree.of_parents(each(parents), each(starts)), pair


def multimodal(size: int) -> Case:
    images = [-1 if i % 13 < 4 else i // 13 for i in range(size)]
    return Multimodal(each(images)), lambda b, h, i, j: j <= i or images[i] == images[j] != -1


def multimodal_batches(size: int) -> Case:
    images = [[i // 9 if i % 9 > b else -1 for i in range(size)] for b in range(BATCH)]
    rule = Multimodal(each(images, dtype=torch.int32))
    return rule, lambda b, h, i, j: j <= i or images[b][i] == images[b][j] != -1


def mixture(size: int) -> Case:
    """Rules with tables, numbers and compositions, by a table of heads."""
    ids = [[(i + b) // 17 for i in range(size)] for b in range(BATCH)]
    of = [2, 0, 1, 1]
    rules = (Causal(), Document(each(ids)) & ~SlidingWindow(2), AttentionSink(2) | BlockDiagonal(6))
    kinds: list[Pair] = [
        lambda b, h, i, j: j <= i,
        lambda b, h, i, j: ids[b][i] == ids[b][j] and not 0 <= i - j < 2,
        lambda b, h, i, j: j < 2 or i // 6 == j // 6,
    ]
    return PerHead(rules, each(of)), lambda b, h, i, j: kinds[of[h]](b, h, i, j)


RULES: dict[str, Callable[[int], Case]] = {
    "dilated": dilated,
    "longformer": longformer,
    "dilated-heads": dilated_heads,
    "global-batches": global_batches,
    "bigbird": bigbird(None, 8, 3),
    "bigbird-heads": bigbird(HEADS, 5, 1),
    "block-diagonal": block_diagonal,
    "block-heads": block_heads,
    "a-shape": a_shape,
    "a-shape-heads": a_shape_heads,
    "vertical-slash": vertical_slash,
    "vertical-slash-batches": vertical_slash_batches,
    "strided-local": strided_local,
    "strided-column": strided_column,
    "strided": strided,
    "fixed-local": fixed_local,
    "fixed-column": fixed_column,
    "fixed": fixed,
    "sparse-transformer": sparse_transformer,
    "tree": tree,
    "tree-batches": tree_batches,
    "multimodal": multimodal,
    "multimodal-batches": multimodal_batches,
    "mixture": mixture,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_definition_pair_by_pair(name: str, size: int) -> None:
    allows(*RULES[name](size), size)


@pytest.mark.parametrize(("size", "q_len"), [(7, 7), (65, 65), (65, 9)])
@pytest.mark.parametrize("name", RULES)
def test_attention_under_a_rule_is_dense_attention_under_its_definition(
    name: str, size: int, q_len: int
) -> None:
    attends(*RULES[name](size), size, q_len)


def test_bigbird_draws_distinct_blocks_outside_its_window_and_the_ends() -> None:
    """As many as asked, or all that there are; for each head apart; the same for the same seed."""
    table = BigBird.drawn(200, block=10, window=3, random=4, heads=HEADS, seed=1).random
    assert table.shape == (HEADS, 20, 20)
    for head in table.tolist():
        for i, row in enumerate(head):
            free = set(range(1, 19)) - {i - 1, i, i + 1}
            drawn = {j for j, chosen in enumerate(row) if chosen}
            assert drawn <= free and len(drawn) == 4
    assert not torch.equal(table[0], table[1])
    assert torch.equal(table, BigBird.drawn(200, 10, 3, 4, heads=HEADS, seed=1).random)
    assert not torch.equal(table, BigBird.drawn(200, 10, 3, 4, heads=HEADS, seed=2).random)
    few = BigBird.drawn(30, block=6, window=3, random=9).random
    assert few.sum(-1).tolist() == [2, 1, 0, 1, 2]


def test_a_table_inside_a_mixture_is_named_where_it_is_too_short() -> None:
    rule = PerHead((Causal(), Document(torch.zeros(5, dtype=torch.int64))))
    with pytest.raises(RuleError, match=r"document_of int64\[5\] at index 6 of axis 0"):
        attends(rule, lambda b, h, i, j: True, 7)


def test_a_head_without_a_rule_is_refused() -> None:
    rule = PerHead((Causal(), SlidingWindow(2)), torch.tensor([0, 1, 1]))
    with pytest.raises(RuleError, match=r"rule_of int64\[3\] at index 3 of axis 0"):
        attends(rule, lambda b, h, i, j: True, 7)


def test_a_mixture_is_described_by_its_rules() -> None:
    rule = PerHead((Causal(), SlidingWindow(2)))
    assert str(rule) == "PerHead(rules=(Causal(), SlidingWindow(size=2)), rule_of=None)"
