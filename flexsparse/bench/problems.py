"""A row of the configuration as the problem it stands for."""

from __future__ import annotations

from typing import assert_never

import torch

from flexsparse.bench.config import Blocks, Config, Decode, Row, RuleAlone, Tokens
from flexsparse.grid import Grid
from flexsparse.measure.problem import Problem, past_blocks, past_tokens, random_pages
from flexsparse.parameters import moved
from flexsparse.rules import MaskRule
from flexsparse.shapes import ceil_div


def problem(row: Row, rule: MaskRule | None, config: Config, device: torch.device) -> Problem:
    """Drawn from the configuration's seed, on the device."""
    of: Blocks | Decode | Tokens | RuleAlone = getattr(row, row.kind)
    draw = torch.Generator(device).manual_seed(config.seed)
    heads = (of.heads, of.kv_heads)
    common = (heads, config.head_dim, getattr(torch, config.dtype), device, moved(rule, device))
    match of:
        case Blocks():
            indices = past_blocks(of.length, of.kv_heads, of.q_block, of.kv_block, of.keep, draw)
            return Problem(
                Grid(of.length, of.length), *common, indices, of.q_block, of.kv_block, of.tile,
                training=of.training,
            )  # fmt: skip
        case Decode():
            pages = ceil_div(of.length, of.page)
            indices = random_pages(of.batch, of.kv_heads, pages, of.keep, draw)
            grid = Grid(1, of.length, batch=of.batch)
            return Problem(grid, *common, indices, 1, of.page, of.tile, causal=False)
        case Tokens():
            indices = past_tokens(of.length, of.keep, draw)
            return Problem(Grid(of.length, of.length), *common, indices, tile=of.tile)
        case RuleAlone():
            grid = Grid(of.length, of.length)
            return Problem(grid, *common, tile=of.tile, causal=of.dense == "causal")
        case _:
            assert_never(of)
