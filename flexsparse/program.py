"""What a kernel evaluates at each (query, key), as code apart from every tensor it reads.

Rule, membership and fallback become one mask program, the score another. A program is known by its
key: the same key is the same kernel, whatever the tensors hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from flexsparse.address import Identity, Taken, address_of
from flexsparse.bounds import check_tables
from flexsparse.grid import Grid
from flexsparse.kernels import membership
from flexsparse.parameters import is_number
from flexsparse.rules import MaskMod, MaskRule, trace_rule
from flexsparse.scores import ScoreMod, ScoreRule, trace_score
from flexsparse.selection import Selection
from flexsparse.shapes import settled_number
from flexsparse.tracing import Traced, code_of
from flexsparse.versions import Versions

Offset = Literal["none", "shared", "batch"]


@dataclass(frozen=True)
class Member:
    """The form of a selection's membership words; ``one_row``: all queries share one row of it."""

    batch: int
    heads: int
    q_block: int
    kv_block: int
    one_row: bool
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        blocks = f"{self.q_block}.{self.kv_block}.{int(self.one_row)}"
        object.__setattr__(self, "key", f"{self.batch}.{self.heads}.{blocks}")

    def holds(
        self, words: Tensor, address: Identity, b: Tensor, h: Tensor, row: Tensor, kv: Tensor
    ) -> Tensor:
        sequence = b if self.batch > 1 else b - b
        if self.heads == 1:
            head = h - h
        else:
            per = address.heads // self.heads
            head = h // per if per > 1 else h
        row = _blocks(row, self.q_block)
        word = membership.word_of(words, sequence, head, row, _blocks(kv, self.kv_block))
        return self.bit(word, row)

    def bit(self, word: Tensor, row: Tensor) -> Tensor:
        """Whether the word says that the row holds its candidate."""
        return membership.bit_of(word, row)


def _blocks(index: Tensor, block: int) -> Tensor:
    # An index is of 32 bits in a kernel, and below any larger block.
    return index // min(block, 2**31 - 1) if block > 1 else index


class FixedTables(NamedTuple):
    """The tensors of a program that no selection changes: the offset's, and the rule's."""

    offset: list[Tensor]
    rule: list[Tensor]


@dataclass(frozen=True, eq=False)
class MaskProgram:
    """rule & (member | fallback), in kernel coordinates."""

    address: Identity
    offset: Offset
    rule: Traced | None
    member: Member | None
    reach: int | None
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rule = self.rule.kind if self.rule else "any"
        member = self.member.key if self.member else "all"
        key = f"{self.address.key}/{self.offset}/{rule}/{member}/{self.reach or 0}"
        object.__setattr__(self, "key", key)

    @property
    def uses_batch(self) -> bool:
        return (
            self.offset == "batch"
            or bool(self.rule and "b" in self.rule.uses)
            or bool(self.member and self.member.batch > 1)
        )

    @property
    def uses_head(self) -> bool:
        return bool(self.rule and "h" in self.rule.uses)

    def fixed_tables(self, grid: Grid, device: torch.device) -> FixedTables:
        """What the code reads whatever is selected."""
        offset = [] if self.offset == "none" else [offset_table(grid, self.offset, device)]
        # Positions are integers, and what torch makes of them beside a number is fp32: what may be
        # seen does not depend on the precision of q.
        rule = [] if self.rule is None else rule_tables(self.rule, device, torch.float32)
        return FixedTables([_own(t) for t in offset], [_own(t) for t in rule])

    def tables(
        self,
        fixed: FixedTables,
        words: Tensor | None = None,
        empty: Tensor | None = None,
        place: Tensor | None = None,
    ) -> list[Tensor]:
        """Every tensor that the code reads, in its order."""
        found = [*([] if place is None else [place]), *fixed.offset]
        if self.member is not None:
            assert words is not None
            found.append(words)
        if self.reach is not None:
            assert empty is not None
            found.append(empty)
        return found + fixed.rule

    @property
    def words_at(self) -> int:
        """Where among the tables the membership words stand."""
        return self.ordered + (self.offset != "none")

    @property
    def ordered(self) -> bool:
        """Whether rows stand in the order of what they select."""
        return isinstance(self.address, Taken) and self.address.axis == "order"

    def of_rule_alone(self) -> MaskProgram:
        """The rule in logical coordinates, without selection."""
        address = Identity(self.address.heads, self.address.kv_heads)
        return replace(self, address=address, member=None, reach=None)

    def versions(self, grid: Grid) -> Versions:
        """Of the tensors which the tiles of a layout depend on, whatever is selected."""
        return Versions.of([*(self.rule.tensors if self.rule else ()), grid.q_offset])

    def reads_the_same(self, tables: Sequence[Tensor], grid: Grid) -> bool:
        """Whether the rule and offset in ``tables``, of the same code, hold what this one's do."""
        device = tables[0].device if tables else torch.device("cpu")
        mine = rule_tables(self.rule, device, torch.float32) if self.rule else []
        theirs = list(tables[len(tables) - len(mine) :])
        if self.offset != "none":
            mine.append(offset_table(grid, self.offset, device))
            theirs.append(tables[self.ordered])
        return all(_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def counts_changes(self, grid: Grid) -> bool:
        """Whether every such tensor counts its changes: those made in inference mode do not."""
        read = [*(self.rule.tensors if self.rule else ()), grid.q_offset]
        return not any(isinstance(t, Tensor) and t.is_inference() for t in read)

    def mod(self, tables: Sequence[Tensor]) -> MaskMod:
        """The whole mask_mod over ``tables``: right wherever it is asked."""
        return self._mod(tables, member=self.member is not None, fallback=self.reach is not None)

    def before_fallback(self, tables: Sequence[Tensor]) -> MaskMod:
        """rule & member: what decides who is empty."""
        return self._mod(tables, member=self.member is not None, fallback=False)

    def within(self, tables: Sequence[Tensor], block_size: Sequence[int]) -> MaskMod:
        """The mask_mod for listed tiles of ``block_size``, which need not ask what the lists say."""
        member = self.asks_member(block_size)
        return self._mod(tables, member=member, fallback=self.reach is not None)

    def asks_member(self, block_size: Sequence[int]) -> bool:
        """Whether a listed tile can hold pairs that are no candidates: not if it lies within one."""
        if self.member is None:
            return False
        queries = max(1, block_size[0] // self.address.rows_per_query)
        rows_within = self.member.one_row or not self.member.q_block % queries
        whole = rows_within and not self.member.kv_block % block_size[1]
        return not whole or self.reach is not None

    def gathers(self, block_size: Sequence[int]) -> int:
        """Table entries read anew for each pair of a listed tile."""
        return (self.rule.gathers if self.rule else 0) + self.asks_member(block_size)

    def _mod(self, tables: Sequence[Tensor], *, member: bool, fallback: bool) -> MaskMod:
        def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            rest = list(tables)
            entry, lane = b, h
            q_idx, kv_idx, word_row = self.address.laid(rest, b, h, q_idx, kv_idx)
            b, h, row, key = self.address.logical(b, h, q_idx, kv_idx)
            position = row
            if self.offset != "none":
                position = row + offset_of(rest.pop(0), self.offset, b)
            allowed = None
            if self.member is not None:
                words = rest.pop(0)
                if member:
                    at = row
                    if word_row is not q_idx:
                        at = self.address.logical(entry, lane, word_row, kv_idx)[2]
                    allowed = self.member.holds(words, self.address, b, h, at, key)
            if self.reach is not None:
                table = rest.pop(0)
                if fallback:
                    # Who is empty is known per list, in kernel coordinates.
                    at_b = entry if table.shape[0] > 1 else entry - entry
                    at_h = lane if table.shape[1] > 1 else lane - lane
                    near = (position >= key) & (position - key < self.reach)
                    near = near & table[at_b, at_h, q_idx]
                    allowed = near if allowed is None else allowed | near
            if self.rule is not None:
                ruled = self.rule.call(b, h, position, key, *rest)
                allowed = ruled if allowed is None else allowed & ruled
            return (key == key) if allowed is None else allowed

        return mask


@dataclass(frozen=True, eq=False)
class ScoreProgram:
    """A score rule in kernel coordinates."""

    address: Identity
    offset: Offset
    score: Traced
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = f"{self.address.key}/{self.offset}/{self.score.kind}"
        object.__setattr__(self, "key", key)

    def tables(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        found = [] if self.offset == "none" else [offset_table(grid, self.offset, device)]
        return found + rule_tables(self.score, device, dtype)

    def mod(self, tables: Sequence[Tensor]) -> ScoreMod:
        def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            rest = list(tables)
            q_idx, kv_idx, _ = self.address.laid(rest, b, h, q_idx, kv_idx)
            b, h, row, key = self.address.logical(b, h, q_idx, kv_idx)
            if self.offset != "none":
                row = row + offset_of(rest.pop(0), self.offset, b)
            return self.score.call(score, b, h, row, key, *rest)

        return score


def offset_kind(grid: Grid) -> Offset:
    if grid.per_batch:
        return "batch"
    return "none" if isinstance(grid.q_offset, int) and grid.q_offset == 0 else "shared"


def offset_table(grid: Grid, kind: Offset, device: torch.device) -> Tensor:
    given = torch.as_tensor(grid.q_offset).to(device=device, dtype=torch.int32)
    return given if kind == "batch" else given.reshape(())


def offset_of(table: Tensor, kind: Offset, b: Tensor) -> Tensor:
    return table[b] if kind == "batch" else table


def rule_tables(traced: Traced, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a rule where a kernel reads them; a plain number in the kernel's precision."""
    found = []
    for tensor in traced.tensors:
        inexact = is_number(tensor) and tensor.is_floating_point()
        found.append(tensor.to(device=device, dtype=dtype) if inexact else tensor.to(device))
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tables hold the same; NaN is the same as NaN here."""
    if a.shape != b.shape:
        return False
    same = a == b
    if a.is_floating_point():
        same = same | (a.isnan() & b.isnan())
    return bool(same.all())


def _own(tensor: Tensor) -> Tensor:
    """A copy of what keeps no count of its changes, so that tiles and masks stay those of one time."""
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    return tensor.clone()


def member_of(select: Selection) -> Member:
    return Member(
        settled_number(select.batch),
        settled_number(select.heads),
        settled_number(select.q_block),
        settled_number(select.kv_block),
        one_row=select.rows == 1,
    )


def mask_program(
    address: Identity,
    grid: Grid,
    rule: MaskRule | None,
    select: Selection | None,
    reach: int | None,
) -> MaskProgram:
    member = None if select is None else member_of(select)
    traced = None if rule is None else trace_rule(rule)
    if traced is not None:
        check_tables(rule, traced, grid, address.heads)
    return MaskProgram(
        address=address,
        offset=offset_kind(grid),
        rule=traced,
        member=member,
        reach=reach if select is not None else None,
    )


def score_program(address: Identity, grid: Grid, score: ScoreRule | None) -> ScoreProgram | None:
    if score is None:
        return None
    traced = trace_score(score)
    check_tables(score, traced, grid, address.heads)
    return ScoreProgram(address, offset_kind(grid), traced)


def _member(key: str) -> Member:
    batch, heads, q_block, kv_block, one_row = map(int, key.split("."))
    return Member(batch, heads, q_block, kv_block, one_row=bool(one_row))


@cache
def mask_of(key: str) -> MaskProgram:
    """The program of a key, without tensors: all that a custom operator is told of it."""
    *address, offset, rule, member, reach = key.split("/")
    assert offset in get_args(Offset)
    return MaskProgram(
        address=address_of("/".join(address)),
        offset=cast(Offset, offset),
        rule=None if rule == "any" else code_of(rule),
        member=None if member == "all" else _member(member),
        reach=int(reach) or None,
    )


@cache
def score_of(key: str) -> ScoreProgram | None:
    if not key:
        return None
    *address, offset, score = key.split("/")
    assert offset in get_args(Offset)
    return ScoreProgram(address_of("/".join(address)), cast(Offset, offset), code_of(score))
