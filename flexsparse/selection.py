"""What is worth seeing: logical candidates as sets, one set a row of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, SelectionError, ShapeError
from flexsparse.given import Given
from flexsparse.kernels.dedupe import sorted_unique
from flexsparse.shapes import ceil_div, settled_number
from flexsparse.shown import Shown
from flexsparse.trees import register

# Positions and candidates are 32-bit in kernels.
LARGEST = 2**31 - 1
OutOfRange = Literal["error", "drop"]


@register
@dataclass(frozen=True, eq=False, repr=False)
class Selection(Shown):
    """``indices [B, H, R, K]`` int32: row r's candidates, unique and rising, then -1.

    Row r stands for the queries ``r * q_block …`` of this call's q tensor, candidate c for the
    positions ``c * kv_block …``. H is 1 (shared by all heads), the number of KV heads, or the
    number of query heads; B is 1 or the batch. Made by `from_indices`, an adapter, or a selector.

    What `from_indices` was given becomes sets at once, on CUDA when somebody first asks for ``indices``:
    a layout may not need them. Until then a change of the given tensor in place is an error; what torch
    does not count, such as the writing of a kernel of one's own, must wait.

    >>> s = Selection.from_indices(torch.tensor([[[[3, 1, 3, -1]]]]), kv_len=4, q_len=1)
    >>> s.indices.tolist()
    [[[[1, 3, -1, -1]]]]
    """

    indices: Tensor
    q_len: int
    kv_len: int
    q_block: int = 1
    kv_block: int = 1

    # What from_indices took, and the sets made of it.
    _given: ClassVar[Given | None] = None

    @staticmethod
    def from_indices(
        indices: Tensor,
        *,
        kv_len: int,
        q_len: int,
        kv_block: int = 1,
        q_block: int = 1,
        out_of_range: OutOfRange = "error",
    ) -> Selection:
        """Any external top-k ``[B, H, R, K]``: any order, repeats, -1 for unused, int32 or int64.

        An index outside the keys raises `SelectionError` with its batch, head, row and value;
        ``out_of_range="drop"`` drops it instead (for holders whose convention is "at or past the
        length means none"). The check reads the device once; inside torch.compile or a CUDA graph
        it cannot, and ``"drop"`` must be said. Inside a CUDA graph a Selection is of what the tensor
        holds at each replay; one made outside needs its ``indices`` read before the capture.

        The length is ``kv_len``, that of k. A sequence that is shorter needs a rule: an unused slot
        that holds its own length is a candidate like any other, and its last block runs past it.
        When decoding, ``rule=Causal(), q_offset=lengths - 1`` keeps both from sight.
        """
        lengths = {"kv_len": kv_len, "q_len": q_len, "kv_block": kv_block, "q_block": q_block}
        for name, value in lengths.items():
            if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
                hint = (
                    ": it is k.shape[2]; sequences of several lengths are the rule's and q_offset's"
                    if isinstance(value, Tensor) and name == "kv_len"
                    else ""
                )
                raise ArgumentError(f"{name} must be an int, got {value!r}{hint}")
            if value < 1:
                raise SelectionError(f"{name} must be at least 1, got {value}")
            if value > LARGEST and name.endswith("len"):
                raise SelectionError(f"{name} must be below 2 ** 31, got {value}")
        if out_of_range not in ("error", "drop"):
            raise ArgumentError(f"out_of_range must be 'error' or 'drop', got {out_of_range!r}")
        q_block, kv_block = settled_number(q_block), settled_number(kv_block)
        _check_form(indices, ceil_div(q_len, q_block), q_block)
        candidates = ceil_div(kv_len, kv_block)
        if indices.shape[-1] == 0:
            indices = indices.new_full((*indices.shape[:3], 1), -1)
        if out_of_range == "error":
            _refuse_outside(indices, candidates)
        width = _width(indices, candidates)
        if not Given.may_wait(indices):
            unique = sorted_unique(indices, candidates, width)
            return Selection._whole(unique, q_len, kv_len, q_block, kv_block)
        made = Selection._whole(None, q_len, kv_len, q_block, kv_block)
        object.__setattr__(made, "_given", Given(indices, candidates, width))
        return made

    @staticmethod
    def of_sets(
        indices: Tensor, *, kv_len: int, q_len: int, kv_block: int, q_block: int
    ) -> Selection:
        """int32 ``[B, H, R, K]`` that are sets already: inside, rising, then -1. Nothing is judged."""
        return Selection._whole(indices, q_len, kv_len, q_block, kv_block)

    def __post_init__(self) -> None:
        # Made by hand: held to what from_indices holds it to.
        judged = Selection.from_indices(
            self.indices,
            kv_len=self.kv_len,
            q_len=self.q_len,
            kv_block=self.kv_block,
            q_block=self.q_block,
        )
        object.__setattr__(self, "indices", judged.indices)

    @staticmethod
    def _whole(
        indices: Tensor | None, q_len: int, kv_len: int, q_block: int, kv_block: int
    ) -> Selection:
        """A Selection of indices that are known to be unique, rising and inside; None for later."""
        made = object.__new__(Selection)
        values = {"q_len": q_len, "kv_len": kv_len, "q_block": q_block, "kv_block": kv_block}
        if indices is not None:
            object.__setattr__(made, "indices", indices)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def __getattr__(self, name: str) -> Any:
        # Asked only for what is not there: indices, before anybody wanted sets.
        given = self._given
        if name != "indices" or given is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        sets = given.sets
        if not torch.compiler.is_compiling() and given.keeps:
            object.__setattr__(self, "indices", sets)
        return sets

    def __getstate__(self) -> dict[str, Any]:
        sets = self.indices
        return {n: v for n, v in vars(self).items() if n != "_given"} | {"indices": sets}

    @property
    def given(self) -> Tensor | None:
        """``[B, H, R, K]`` as `from_indices` took them, while no sets were made; inside torch.compile
        there are always sets."""
        if torch.compiler.is_compiling() or self._given is None:
            return None
        return self._given.tensor

    @property
    def held(self) -> Tensor | Given:
        """What counts the changes of what it holds; always the same object."""
        return self.indices if self._given is None else self._given

    @property
    def shape(self) -> torch.Size:
        """Of ``indices``, which need not be made for it."""
        return self.indices.shape if self._given is None else self._given.shape

    @property
    def device(self) -> torch.device:
        return self.indices.device if self._given is None else self._given.device

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def heads(self) -> int:
        return self.shape[1]

    @property
    def rows(self) -> int:
        return self.shape[2]

    @property
    def candidates(self) -> int:
        """How many candidates there are to choose from."""
        return ceil_div(self.kv_len, self.kv_block)

    @property
    def counts(self) -> Tensor:
        """``[B, H, R]``: how many candidates each row has."""
        return (self.indices >= 0).sum(-1)

    def blocks(self) -> Tensor:
        """bool ``[B, H, R, candidates]``."""
        chosen = torch.zeros(
            (*self.shape[:3], self.candidates + 1), dtype=torch.bool, device=self.device
        )
        slot = torch.where(self.indices < 0, self.candidates, self.indices).to(torch.int64)
        return chosen.scatter_(-1, slot, True)[..., : self.candidates]

    def dense(self, queries: Tensor | None = None) -> Tensor:
        """bool ``[B, H, q_len, kv_len]``, or only the rows of the query indices given, ``[n]``."""
        if queries is None:
            queries = torch.arange(self.q_len, device=self.device)
        block = min(self.kv_block, self.kv_len)
        rows = Selection._whole(
            self.indices[:, :, queries // self.q_block], len(queries), self.kv_len, 1, block
        )
        return rows.blocks().repeat_interleave(block, -1)[..., : self.kv_len]

    def to(self, device: torch.device | str) -> Selection:
        return self._with(self.indices.to(device))

    def refine(self, *, q_block: int, kv_block: int) -> Selection:
        """The same pairs in smaller blocks, which must divide the present ones."""
        if min(q_block, kv_block) < 1:
            raise SelectionError(f"refine needs blocks of at least 1, got ({q_block}, {kv_block})")
        if self.q_block % q_block or self.kv_block % kv_block:
            raise SelectionError(
                f"refine needs blocks that divide ({self.q_block}, {self.kv_block}), "
                f"got ({q_block}, {kv_block})"
            )
        split = self.kv_block // kv_block
        inner = torch.arange(split, device=self.device)
        fine = self.indices[..., None] * split + inner
        total = ceil_div(self.kv_len, kv_block)
        valid = (self.indices >= 0)[..., None] & (fine < total)
        fine = torch.where(valid, fine, -1).flatten(-2).to(torch.int32)
        rows = torch.arange(ceil_div(self.q_len, q_block), device=fine.device)
        fine = fine[:, :, rows * q_block // self.q_block]
        return Selection._whole(fine, self.q_len, self.kv_len, q_block, kv_block)._sorted()

    def union(self, other: Selection) -> Selection:
        """Candidates of either."""
        mine, theirs = _aligned(self, other)
        return mine._with(torch.cat([mine.indices, theirs.indices], -1))._sorted()

    def intersection(self, other: Selection) -> Selection:
        """Candidates of both."""
        mine, theirs = _aligned(self, other)
        chosen = theirs.blocks()
        slot = mine.indices.clamp(min=0).to(torch.int64)
        kept = (mine.indices >= 0) & chosen.gather(-1, slot)
        return mine._with(torch.where(kept, mine.indices, -1))._sorted()

    __or__ = union
    __and__ = intersection

    def _sorted(self) -> Selection:
        width = _width(self.indices, self.candidates)
        return self._with(sorted_unique(self.indices, self.candidates, width))

    def _with(self, indices: Tensor) -> Selection:
        return Selection._whole(indices, self.q_len, self.kv_len, self.q_block, self.kv_block)

    def __repr__(self) -> str:
        b, h, r, k = self.shape
        return (
            f"Selection([{b}, {h}, {r}, {k}] of {self.candidates} candidates{self._kept()}, "
            f"q_len={self.q_len}, kv_len={self.kv_len}, q_block={self.q_block}, "
            f"kv_block={self.kv_block})"
        )

    def _kept(self) -> str:
        """How many candidates the rows have, where that is to be read: a CPU's own tensor, no traced one."""
        given = self._given
        changed = given is not None and not (given.keeps or given.current)
        if self.device.type != "cpu" or changed:
            return ""
        own = type(self.indices) is Tensor
        traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        if not own or traced or torch._C._functorch.peek_interpreter_stack() or not self.rows:
            return ""
        counts = self.counts
        least, most = int(counts.min()), int(counts.max())
        if least == most:
            return f", {most} a row"
        return f", {least} to {most} a row, mean {float(counts.double().mean()):.3g}"


def _check_form(indices: Tensor, rows: int, q_block: int) -> None:
    if not isinstance(indices, Tensor):
        raise ArgumentError(f"indices must be a tensor [B, H, R, K], got {type(indices).__name__}")
    shape = list(indices.shape)
    if indices.dtype not in (torch.int32, torch.int64):
        hint = (
            ": a mask is a rule, lambda b, h, q, kv: mask[q, kv]"
            if indices.dtype == torch.bool
            else ""
        )
        raise ArgumentError(f"indices must be int32 or int64, got {indices.dtype}{hint}")
    if indices.layout != torch.strided:
        raise ArgumentError(
            f"indices must be a dense tensor, got {indices.layout}: give each row's candidates, padded with -1"
        )
    if indices.ndim == 3:
        raise ShapeError(
            f"indices must be [B, H, R, K], got three axes {shape}: for [B, S_q, k] shared by all "
            "heads use adapters.dsa (or adapters.attn_gym)"
        )
    if indices.ndim != 4:
        raise ShapeError(f"indices must be [B, H, R, K], got {indices.ndim} axes {shape}")
    if indices.shape[2] != rows:
        if indices.shape[1] == rows and q_block == 1:
            raise ShapeError(
                f"indices must be [B, H, R, K] with R = {rows}, got {shape}: for [B, T, H_kv, K] use "
                "adapters.nsa"
            )
        raise ShapeError(
            f"indices must be [B, H, R, K] with R = ceil(q_len / q_block) = {rows}, got R = "
            f"{indices.shape[2]} in {shape}"
        )
    if indices.shape[0] < 1 or indices.shape[1] < 1:
        raise ShapeError(f"indices must have at least one batch and one head, got {shape}")


def _width(indices: Tensor, candidates: int) -> int:
    """A set of candidates cannot be larger than there are candidates."""
    return max(1, min(indices.shape[-1], candidates))


def _refuse_outside(indices: Tensor, candidates: int) -> None:
    if torch.compiler.is_compiling() or (
        indices.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        raise SelectionError(
            "out_of_range='error' reads indices on the host, which a compiled or captured region "
            "cannot: say out_of_range='drop', or build the Selection outside"
        )
    if indices.is_meta:
        raise SelectionError(
            "indices are on meta, where they have no values: move them to a device"
        )
    outside = (indices < -1) | (indices >= candidates)
    if bool(outside.any()):
        b, h, row, slot = (int(i) for i in outside.nonzero()[0])
        raise SelectionError(
            f"index {int(indices[b, h, row, slot])} at batch {b}, head {h}, row {row} lies outside "
            f"the {candidates} candidates 0..{candidates - 1} (-1 means none): correct it, or say "
            "out_of_range='drop'"
        )


def _aligned(a: Selection, b: Selection) -> tuple[Selection, Selection]:
    """Both over the same blocks, heads and batch."""
    if not isinstance(b, Selection):
        raise ArgumentError(f"a Selection joins a Selection, got {type(b).__name__}")
    if (a.q_len, a.kv_len) != (b.q_len, b.kv_len):
        raise ShapeError(
            f"selections over different lengths: q_len {a.q_len} and {b.q_len}, "
            f"kv_len {a.kv_len} and {b.kv_len}"
        )
    for name, mine, theirs in (
        ("q_block", a.q_block, b.q_block),
        ("kv_block", a.kv_block, b.kv_block),
    ):
        if max(mine, theirs) % min(mine, theirs):
            raise SelectionError(
                f"selections with {name} {mine} and {theirs} do not combine: refine one of them to "
                "blocks that divide the other's"
            )
    blocks = {"q_block": min(a.q_block, b.q_block), "kv_block": min(a.kv_block, b.kv_block)}
    a, b = a.refine(**blocks), b.refine(**blocks)
    pair = []
    for axis, name in ((0, "batch"), (1, "heads")):
        sizes = (a.shape[axis], b.shape[axis])
        if max(sizes) % min(sizes) or (axis == 0 and min(sizes) not in (1, max(sizes))):
            raise ShapeError(f"selections with {name} {sizes[0]} and {sizes[1]} do not combine")
    for one in (a, b):
        batch = max(a.batch, b.batch)
        heads = max(a.heads, b.heads)
        spread = one.indices.expand(batch, -1, -1, -1) if one.batch == 1 else one.indices
        pair.append(one._with(spread.repeat_interleave(heads // one.heads, 1)))
    return pair[0], pair[1]
