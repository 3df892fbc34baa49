"""Other libraries' ways from indices to what their kernels walk, where they are installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flexsparse.measure.contender import Contender, UnfitError, scattered
from flexsparse.measure.conversion import Conversion

# Rows of blocks that FlashInfer's wrapper has room for.
_FLASHINFER_ROWS = 32768
_FLASHINFER_WORKSPACE = 128 * 2**20


def attn_gym_vsa(made: Conversion) -> Contender:
    """attention-gym's BlockMask of a top-k over square tiles."""
    vsa = _installed("attn_gym.masks.vsa", "attn_gym")
    problem, layout = made.problem, made.layout
    if problem.indices is None:
        raise UnfitError("it takes indices of tiles, not a rule")
    tile = layout.block_size
    if (
        not problem.q_block == problem.kv_block == tile[0] == tile[1]
        or problem.grid.q_len % tile[0]
    ):
        raise UnfitError("it takes whole square tiles that are the candidates")
    # It knows no -1: repeats of the last tile cost the same.
    indices = problem.indices
    filled = torch.where(indices < 0, indices.amax(-1, keepdim=True), indices)
    folded = layout.address.lists(filled, problem.grid.batch).contiguous()
    columns = layout.span.tiles[1]
    return Contender(
        lambda: vsa.create_vsa_block_mask(folded, tile[0], columns),
        "from indices without -1; rule and repeats left out, lists by column always made",
    )


def flashinfer_plan(made: Conversion) -> Contender:
    """FlashInfer's plan of a map of blocks, the map scattered from the indices."""
    problem = made.problem
    flashinfer = _installed("flashinfer", "flashinfer")
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
    workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=problem.device)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace)
    indices = problem.indices

    def plan() -> None:
        present = scattered(indices, columns).expand(batch, kv_heads, -1, -1)
        blocks = present.reshape(lists, rows, columns)
        wrapper.plan(
            blocks, row_sizes, column_sizes, batch * heads, lists, problem.head_dim,
            q_data_type=problem.dtype,
        )  # fmt: skip

    return Contender(
        plan, "from indices: scatter and plan; rule left out", "it reads the device on the host"
    )


def _installed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        raise UnfitError(
            f"{package} is not installed" if missing else f"{package} does not import: {error}"
        ) from None
