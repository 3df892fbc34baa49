"""The protocol of a selector: score blocks of keys, keep the best that the rule reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from einops import rearrange, reduce
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.errors import ArgumentError, SelectionError, ShapeError
from flexsparse.grid import Grid
from flexsparse.intervals import reach
from flexsparse.kernels.top_k import ranks, top_k
from flexsparse.rules import MaskMod, as_rule, refuse_undecorated
from flexsparse.selection import Selection
from flexsparse.selectors.budgets import Budget, Mass, alike, as_budgets, counts, width
from flexsparse.selectors.caches import Cache, KeyCache
from flexsparse.selectors.physical import Keep, Tiles
from flexsparse.shapes import axes

Heads = Literal["shared", "kv", "query"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Selector:
    """Keeps, for each row of ``q_block`` queries, the best blocks of ``block`` keys.

    Write a frozen dataclass with ``score(q, k, grid) -> [B, H, R, C]``, higher is better, H one of
    1, Hkv or Hq. The base class hides what the rule forbids to the whole row before the top-k, so
    that no budget goes to the future; equal scores go to the lower index on every device; a row
    with fewer blocks within reach has fewer candidates, but never none. A score of -inf means never,
    NaN only if nothing else is left.

    ``keep`` is a count of blocks (int), a fraction of the blocks within reach (float between 0 and 1,
    rounded up) or a `Mass` (top-p); a tuple or tensor of such gives one a head, for as many heads as
    ``score`` has. A `Tiles` also limits how many key tiles a query tile's rows touch together.
    """

    # Whether scores are attention mass themselves; a Mass is otherwise one of exp(score).
    scores_are_mass: ClassVar[bool] = False

    block: int = 64
    keep: Keep = 16
    q_block: int = 64

    def __new__(cls, *values: Any, **named: Any) -> Self:
        refuse_undecorated(cls, bool(values or named), SelectionError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in ("block", "q_block"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} {field} must be an int of at least 1, got {value!r}")
        if isinstance(self.keep, Tiles):
            self.keep.check(name, self.q_block, self.block)
        elif isinstance(self.keep, Tensor):
            # Read once, here: no step asks the device how wide a list is.
            object.__setattr__(self, "keep", as_budgets(name, self.keep))
        else:
            as_budgets(name, self.keep)

    def cache(self, k: Tensor, capacity: int | None = None) -> Cache:
        """The state of decoding after the keys ``k [B, Hkv, S, D]``, with room for ``capacity`` in all.

        ``cache.append(k_new)`` adds keys, ``cache.select(q, grid, rule)`` gives the same sets as
        ``select`` over all keys so far. Here the keys are kept; selectors that can do with less do.
        """
        return KeyCache(self, k, capacity)

    def score(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """``q [B, Hq, Q, D]``, ``k [B, Hkv, S, D]`` -> how much each block is worth to each row."""
        raise SelectionError(
            f"{type(self).__name__} needs a method score(self, q, k, grid) -> [B, H, R, C], or its "
            "own select"
        )

    def forced(self, grid: Grid, device: torch.device) -> Tensor | None:
        """bool ``[B or 1, 1, R, C]``: blocks that a row keeps before all others, as far as the rule lets it.

        They are part of ``keep``. None, as here, forces nothing.
        """
        return None

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None = None) -> Selection:
        """The candidates of each row: unique, rising, within the rule's reach."""
        check_call(type(self).__name__, q, k, grid)
        return self.chosen(q, k, self.score(q, k, grid), grid, rule)

    def chosen(
        self, q: Tensor, k: Tensor, score: Tensor, grid: Grid, rule: MaskMod | None
    ) -> Selection:
        """The Selection of scores ``[B, H, R, C]``, once they are judged; of ``k`` only heads count."""
        name = f"{type(self).__name__}.score"
        if not isinstance(score, Tensor) or not score.is_floating_point():
            given = score.dtype if isinstance(score, Tensor) else type(score).__name__
            raise SelectionError(f"{name} must return a float tensor [B, H, R, C], got {given}")
        rows, blocks = grid.shape(self.q_block, self.block)
        allowed = {1, k.shape[1], q.shape[1]}
        fits = score.ndim == 4 and score.shape[0] in (1, grid.batch) and score.shape[1] in allowed
        if fits and score.shape[2] == 1:
            # One score for all rows.
            score = score.expand(-1, -1, rows, -1)
        if not fits or score.shape[2:] != (rows, blocks):
            batch = "1" if grid.batch == 1 else f"1 or {grid.batch}"
            raise SelectionError(
                f"{name} must return [B, H, R, C] with B {batch}, H one of {sorted(allowed)}, R {rows} or 1 "
                f"and C {blocks}, got {list(score.shape)}: grid.shape(self.q_block, self.block) is (R, C)"
            )
        reachable = None
        if as_rule(rule) is not None:
            reachable = self.within_reach(q, k, grid, rule, score.shape[1])
        return self.best(score, reachable, grid)

    def within_reach(
        self, q: Tensor, k: Tensor, grid: Grid, rule: MaskMod | None, heads: int
    ) -> Tensor:
        """bool ``[B or 1, heads or 1, R, C]``: blocks of which some query of the row may see a key.

        Of ``q`` and ``k`` only the numbers of heads count.
        """
        block = min(self.q_block, grid.q_len), min(self.block, grid.kv_len)
        span = Span(grid.q_len, grid.kv_len, *block)
        reached = reach(rule, grid, (q.shape[1], k.shape[1]), span, q.device)
        lanes = reached.shape[1]
        if lanes > heads:
            # A list serves several query heads: it may hold what any of them may see.
            reached = rearrange(reached, "b (g r) m n -> b g r m n", g=heads).any(2)
        return reached

    def best(self, score: Tensor, reachable: Tensor | None, grid: Grid) -> Selection:
        """The highest scores within reach, as many as ``keep`` says, as a Selection."""
        tiles = self.keep if isinstance(self.keep, Tiles) else None
        each = self.keep.each if isinstance(self.keep, Tiles) else self.keep
        budgets = as_budgets(type(self).__name__, each)
        forced = self.forced(grid, score.device)
        count = None
        if tiles is not None or not alike(budgets, score.shape[1]):
            count, opened = self._counted(score, reachable, forced, budgets, tiles)
            if opened is not None:
                # What tiles leave open is ranked anew, the forced among it first.
                reachable = opened if reachable is None else opened & reachable
        chosen = top_k(
            score, width(budgets, score.shape[-1]), reach=reachable, forced=forced, count=count
        )
        return Selection.of_sets(
            chosen,
            kv_len=grid.kv_len,
            q_len=grid.q_len,
            kv_block=self.block,
            q_block=self.q_block,
        )

    def _counted(
        self,
        score: Tensor,
        reachable: Tensor | None,
        forced: Tensor | None,
        budgets: tuple[Budget, ...],
        tiles: Tiles | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, H, R]``: how many blocks each row keeps; and with ``tiles`` which blocks it may."""
        rank = ranks(score, reachable, forced)
        value, order = rank.sort(dim=-1, descending=True, stable=True)
        within = (value > -torch.inf).sum(-1)
        weighs = any(isinstance(budget, Mass) for budget in budgets)
        mass = self._mass(score, rank).gather(-1, order) if weighs else value
        first = None if forced is None else value == torch.inf
        count = counts(type(self).__name__, budgets, mass, first, within)
        if tiles is None:
            return count, None
        kept = torch.zeros_like(rank, dtype=torch.bool)
        slot = torch.arange(rank.shape[-1], device=rank.device)
        kept.scatter_(-1, order, slot < count[..., None])
        return count, tiles.open(rank, kept, self.q_block, self.block)

    def _mass(self, score: Tensor, rank: Tensor) -> Tensor:
        """float64 ``[B, H, R, C]``: what each block weighs beside the others of its row."""
        range_ = torch.finfo(score.dtype)
        score = score.nan_to_num(nan=range_.min, posinf=range_.max, neginf=-torch.inf)
        score = score.double().masked_fill(rank == -torch.inf, -torch.inf)
        if self.scores_are_mass:
            return score.clamp(min=0)
        return (
            score - score.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
        ).exp()


def check_call(name: str, q: Tensor, k: Tensor, grid: Grid) -> None:
    """Refuses queries and keys of other lengths than the grid, or whose heads do not group."""
    if not isinstance(grid, Grid):
        raise ArgumentError(f"{name} selects on a Grid(q_len, kv_len), got {type(grid).__name__}")
    sizes = axes(q=(q, "b h q d"), k=(k, "b g s e"))
    if (sizes["q"], sizes["s"]) != (grid.q_len, grid.kv_len):
        raise ShapeError(
            f"{name} was given q {list(q.shape)} and k {list(k.shape)}, but {grid}: the grid must be "
            f"Grid({sizes['q']}, {sizes['s']}, batch={sizes['b']})"
        )
    if sizes["h"] % sizes["g"]:
        raise ShapeError(
            f"{name} was given {sizes['h']} query heads over {sizes['g']} KV heads: Hq must be a "
            "multiple of Hkv"
        )


def own_blocks(
    grid: Grid, q_block: int, block: int, device: torch.device, *, first: int = 0, last: int = 1
) -> Tensor:
    """bool ``[B or 1, 1, R, C]``: the ``first`` blocks, and the ``last`` ones up to a row's own.

    The own block of a row is the one of its last query's position.

    >>> own_blocks(Grid(4, 4), 1, 1, torch.device("cpu"), first=1, last=2).int()[0, 0]
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """
    rows, blocks = grid.shape(q_block, block)
    end = ((torch.arange(rows, device=device) + 1) * q_block).clamp(max=grid.q_len) - 1
    own = torch.div(grid.positions(device)[:, end], block, rounding_mode="floor")[:, None, :, None]
    column = torch.arange(blocks, device=device)
    return (column < first) | ((column <= own) & (column > own - last))


def pooled(x: Tensor, block: int, fill: float) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, C, block, D]``, the last block filled up with ``fill``."""
    block = min(block, x.shape[2])
    missing = -x.shape[2] % block
    x = torch.nn.functional.pad(x, (0, 0, 0, missing), value=fill)
    return rearrange(x, "b h (c s) d -> b h c s d", s=block)


def per_list(x: Tensor, kv_heads: int, heads: Heads, how: Literal["max", "sum"]) -> Tensor:
    """``[B, Hq, …]`` -> one entry a list: shared by all, one a KV head, or one a query head."""
    if heads == "query":
        return x
    lists = 1 if heads == "shared" else kv_heads
    return reduce(x, "b (g r) m n -> b g m n", how, g=lists)


def sharing(q: Tensor, k: Tensor, heads: Heads) -> int:
    """How many query heads share a list."""
    return {"query": 1, "kv": q.shape[1] // k.shape[1], "shared": q.shape[1]}[heads]


def check_sharing(name: str, heads: str) -> None:
    if heads not in ("shared", "kv", "query"):
        raise ArgumentError(f"{name} heads must be 'shared', 'kv' or 'query', got {heads!r}")
