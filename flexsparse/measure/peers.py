"""Other libraries' ways from indices to what their kernels walk, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexsparse.measure.contender import Contender, UnfitError, installed, scattered
from flexsparse.measure.conversion import Conversion
from flexsparse.shapes import ceil_div

# Rows of blocks that FlashInfer's wrapper has room for.
_FLASHINFER_ROWS = 32768
FLASHINFER_WORKSPACE = 128 * 2**20


def attn_gym_vsa(made: Conversion) -> Contender:
    """attention-gym's BlockMask of a top-k over square tiles."""
    vsa = installed("attn_gym.masks.vsa", "attn_gym")
    given = vsa_indices(made)
    return Contender(
        lambda: vsa.create_vsa_block_mask(*given),
        "from indices without -1; rule and repeats left out, lists by column always made",
    )


def vsa_indices(made: Conversion) -> tuple[Tensor, int, int]:
    """Indices as attention-gym takes them, KV heads folded; the tile, and how many there are."""
    problem = made.problem
    if problem.indices is None:
        raise UnfitError("it takes indices of tiles, not a rule")
    tile = problem.q_block
    if tile != problem.kv_block or tile < 16 or problem.grid.q_len % tile:
        raise UnfitError("it takes whole square tiles that are the candidates")
    # It knows no -1: repeats of the last tile cost the same.
    indices = problem.indices
    filled = torch.where(indices < 0, indices.amax(-1, keepdim=True), indices)
    folded = filled.expand(problem.grid.batch, problem.heads[1], -1, -1).flatten(0, 1)[:, None]
    return folded.contiguous(), tile, ceil_div(problem.grid.kv_len, tile)


def flashinfer_plan(made: Conversion) -> Contender:
    """FlashInfer's plan of a map of blocks, the map scattered from the indices."""
    _, plan = flashinfer_blocks(made)
    return Contender(
        plan, "from indices: scatter and plan; rule left out", "it reads the device on the host"
    )


def flashinfer_blocks(made: Conversion) -> tuple[Any, Callable[[], None]]:
    """FlashInfer's wrapper of variable blocks, and its plan from the problem's indices."""
    problem = made.problem
    flashinfer = installed("flashinfer", "flashinfer")
    if problem.device.type != "cuda":
        raise UnfitError("it needs a CUDA device")
    if problem.indices is None:
        raise UnfitError("it takes a map of blocks, not a rule")
    selection = problem.select()
    assert selection is not None
    batch, (heads, kv_heads), grid = problem.grid.batch, problem.heads, problem.grid
    lists, rows, columns = batch * kv_heads, selection.rows, selection.candidates
    if lists * rows > _FLASHINFER_ROWS:
        raise UnfitError(
            f"{lists} lists of {rows} rows are more than the {_FLASHINFER_ROWS} it holds"
        )
    if selection.heads not in (1, kv_heads):
        raise UnfitError("it takes a list per KV head")

    def sizes(length: int, block: int, count: int) -> Tensor:
        ends = (torch.arange(count + 1, device=problem.device) * block).clamp(max=length)
        return ends.diff().to(torch.int32).expand(lists, -1).contiguous()

    row_sizes = sizes(grid.q_len, problem.q_block, rows)
    column_sizes = sizes(grid.kv_len, problem.kv_block, columns)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=problem.device)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace)
    indices = problem.indices

    def plan() -> None:
        present = scattered(indices, columns).expand(batch, kv_heads, -1, -1)
        blocks = present.reshape(lists, rows, columns)
        wrapper.plan(
            blocks, row_sizes, column_sizes, batch * heads, lists, problem.head_dim,
            q_data_type=problem.dtype,
        )  # fmt: skip

    return wrapper, plan
