"""A row of the configuration as the problem it stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import torch

from flexsparse.bench.config import (
    Blocks,
    Chosen,
    Config,
    Decode,
    Form,
    Linear,
    Nsa,
    Ragged,
    Row,
    RuleAlone,
    Tokens,
)
from flexsparse.errors import ArgumentError
from flexsparse.grid import Grid
from flexsparse.masks.causal import Causal
from flexsparse.masks.document import Document
from flexsparse.measure.draws import (
    CLUSTER,
    clustered_tokens,
    lognormal_lengths,
    long_tailed,
    page_scores,
    past_blocks,
    past_tokens,
)
from flexsparse.measure.problem import Problem
from flexsparse.parameters import moved
from flexsparse.rules import MaskRule
from flexsparse.selectors.base import Selector
from flexsparse.shapes import ceil_div


def problem(
    row: Row,
    rule: MaskRule | None,
    config: Config,
    device: torch.device,
    selector: Selector | None = None,
) -> Problem:
    """Drawn from the configuration's seed, on the device."""
    of: Form = row.of
    draw = torch.Generator(device).manual_seed(config.seed)
    heads = (of.heads, of.kv_heads)
    head_dim = row.head_dim or config.head_dim
    common = (heads, head_dim, getattr(torch, config.dtype), device, moved(rule, device))
    match of:
        case Blocks():
            return _blocks(of, common, draw)
        case Nsa():
            chosen = past_blocks(
                of.length, of.kv_heads, of.shared, of.block, of.keep, draw, first=True
            )
            indices = chosen.repeat_interleave(of.shared, 2)
            return Problem(
                Grid(of.length, of.length), *common, indices, 1, of.block, of.tile,
                training=of.training,
            )  # fmt: skip
        case Decode():
            pages = ceil_div(of.length, of.page)
            scores = page_scores(of.batch, of.kv_heads, pages, draw)
            indices = scores.topk(min(of.keep, pages), dim=-1).indices
            grid = Grid(1, of.length, batch=of.batch)
            return Problem(
                grid, *common, indices, 1, of.page, of.tile, causal=False, scores=scores
            )  # fmt: skip
        case Tokens():
            return _tokens(of, common, draw)
        case RuleAlone():
            return Problem(
                Grid(of.length, of.length), *common, tile=of.tile, training=of.training,
                causal=of.dense == "causal", fresh=of.fresh,
            )  # fmt: skip
        case Ragged():
            return _ragged(of, common[:4])
        case Chosen():
            assert selector is not None
            plain = Problem(Grid(of.length, of.length), *common, tile=of.tile, training=of.training)
            q, k, _ = (x.detach() for x in plain.qkv(config.seed))
            found = selector.select(q, k, plain.grid, plain.rule)
            return replace(
                plain, indices=found.indices, q_block=found.q_block, kv_block=found.kv_block
            )
        case Linear():
            raise ArgumentError("a linear row stands for several problems: ask for `budgets`")
        case _:
            assert_never(of)


def budgets(row: Row, rule: MaskRule | None, config: Config, device: torch.device) -> list[Problem]:
    """The problems of a linear row, one for each budget."""
    of = row.linear
    assert of is not None
    plain = of.model_dump(exclude={"keeps"}) | {"training": False}
    rows = [Row(name=row.name, blocks=Blocks(**plain, keep=keep)) for keep in of.keeps]
    return [problem(one, rule, config, device) for one in rows]


Common = tuple[tuple[int, int], int, torch.dtype, torch.device]


def _blocks(of: Blocks, common: tuple[*Common, MaskRule | None], draw: torch.Generator) -> Problem:
    blocks = (of.q_block, of.kv_block)

    def keeping(keep: int | torch.Tensor) -> Problem:
        indices = past_blocks(of.length, of.kv_heads, *blocks, keep, draw)
        return Problem(
            Grid(of.length, of.length), *common, indices, *blocks, of.tile, training=of.training,
            causal=of.causal,
        )  # fmt: skip

    if of.tail is None:
        return keeping(of.keep)
    tail = (of.tail.rows, of.tail.share)
    counts = long_tailed(of.length, of.kv_heads, blocks, of.keep, tail, draw)
    # Shares of the whole that differ by one at most.
    ends = torch.arange(counts.numel() + 1, device=counts.device) * counts.sum() // counts.numel()
    even = keeping(ends.diff().view_as(counts))
    return replace(keeping(counts), even=even, padded=keeping(int(counts.max())))


def _tokens(of: Tokens, common: tuple[*Common, MaskRule | None], draw: torch.Generator) -> Problem:
    grid = Grid(of.length, of.length)
    if of.blocks is None:
        indices = past_tokens(of.length, of.keep, draw)
        return Problem(grid, *common, indices, tile=of.tile, training=of.training)
    blocks = past_blocks(of.length, 1, CLUSTER, CLUSTER, of.blocks, draw)
    whole = Problem(
        grid, *common, blocks, CLUSTER, CLUSTER, of.tile or CLUSTER, training=of.training
    )
    indices = clustered_tokens(blocks, of.length, of.keep // of.blocks, draw)
    return replace(whole, indices=indices, q_block=1, kv_block=1, whole=whole)


def _ragged(of: Ragged, common: Common) -> Problem:
    lengths = lognormal_lengths(of.total, of.smallest, of.largest, of.seed)
    # Equal documents of which a token sees as many keys on average.
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    mean = max(1, round(2 * pairs / of.total) - 1)

    def packed(lengths: tuple[int, ...]) -> Problem:
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(torch.int32)
        rule = moved(Causal() & Document(ids), common[3])
        grid = Grid(sum(lengths), sum(lengths))
        return Problem(
            grid, *common, rule, tile=of.tile, training=of.training, fresh=True, lengths=lengths
        )

    return replace(packed(lengths), even=packed((mean,) * max(1, round(of.total / mean))))
