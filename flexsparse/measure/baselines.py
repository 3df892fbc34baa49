"""What others do instead of this library's conversion: each a call of the same run, or why not."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexsparse.coverage import Span
from flexsparse.device.clock import Call
from flexsparse.kernels.compress import compress
from flexsparse.kernels.rows import EMPTY, FULL
from flexsparse.layout import widened
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.cost import cost, first_line
from flexsparse.shapes import ceil_div

# Rows of blocks that FlashInfer's wrapper has room for.
_FLASHINFER_ROWS = 32768
_FLASHINFER_WORKSPACE = 128 * 2**20


class UnfitError(Exception):
    """Why a baseline does not run on a problem."""


class Contender(NamedTuple):
    """``call`` does the work and gives what it made; ``note`` says what of the problem it leaves out,
    or what it is given that others must make."""

    call: Call
    note: str


def from_kv_blocks(made: Conversion) -> Contender:
    """torch's BlockMask from finished lists by row: the lists by column are its work."""
    from torch.nn.attention.flex_attention import BlockMask

    layout, training = made.layout, made.problem.training
    num, idx, full_num, full_idx = widened(layout.lists, layout.span)[:4]
    arguments = _arguments(made)
    note = "lists by row given" + ("" if training else ", none by column made")
    return Contender(
        lambda: BlockMask.from_kv_blocks(num, idx, full_num, full_idx, **arguments), note
    )


def eager_lists(made: Conversion) -> Contender:
    """The same from indices: scattered to a map, reduced to tiles and sorted, in plain torch."""
    from torch.nn.attention.flex_attention import BlockMask

    problem, layout, plan = made.problem, made.layout, made.plan
    indices = problem.indices
    if indices is None or plan is None:
        raise UnfitError("there are no indices: a rule alone is converted")
    codes = plan.ahead.codes
    if codes is not None and codes.shape[1] > 1:
        raise UnfitError("the rule differs from head to head")
    blocks = (problem.q_block, problem.kv_block)
    if any(a % b and b % a for a, b in zip(blocks, layout.block_size, strict=True)):
        raise UnfitError("blocks and tiles do not nest")
    address, span, batch = layout.address, layout.span, problem.grid.batch
    columns, arguments = ceil_div(problem.grid.kv_len, problem.kv_block), _arguments(made)

    def lists() -> BlockMask:
        chosen = _map_of(indices, columns)
        touched, covered = (address.lists(m, batch) for m in _tiles(chosen, blocks, span))
        if codes is not None:
            touched, covered = touched & (codes != EMPTY), covered & (codes == FULL)
        full = touched & covered
        rows = *compress(touched & ~full), *compress(full)
        return BlockMask.from_kv_blocks(*rows, **arguments)

    member = layout.program.asks_member(layout.block_size)
    left_out = "; membership inside tiles left out" if member else ""
    return Contender(lists, f"from indices: scatter, sort, from_kv_blocks{left_out}")


def compiled_create_block_mask(made: Conversion) -> Contender:
    """torch's create_block_mask, compiled, over every pair of the same mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    layout, grid = made.layout, made.problem.grid
    b, h = layout.kv_num_blocks.shape[:2]
    needed, free = b * h * grid.q_len * grid.kv_len, _free_bytes(made.problem.device)
    if needed > free:
        raise UnfitError(
            f"a byte for each of its pairs is {needed / 2**30:,.0f} GiB, and {free / 2**30:,.0f} are free"
        )
    mask = layout.mask_mod
    body: Any = create_block_mask
    # torch counts specialisations per code object, and past eight of them goes on uncompiled.
    own = FunctionType(
        body.__code__.replace(co_name=f"create_block_mask_{id(made)}"),
        body.__globals__,
        body.__name__,
        body.__defaults__,
        body.__closure__,
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False)
    sizes = (b, h, grid.q_len, grid.kv_len, str(made.problem.device), layout.block_size)
    given = ", membership given as bits" if layout.select is not None else ""
    return Contender(lambda: compiled(mask, *sizes), f"every pair evaluated{given}")


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
        present = _map_of(indices, columns).expand(batch, kv_heads, -1, -1)
        blocks = present.reshape(lists, rows, columns)
        wrapper.plan(
            blocks, row_sizes, column_sizes, batch * heads, lists, problem.head_dim,
            q_data_type=problem.dtype,
        )  # fmt: skip

    return Contender(plan, "from indices: scatter and plan; rule left out, waits for the device")


Name = Literal["from_kv_blocks", "eager lists", "create_block_mask", "attn_gym", "flashinfer"]
BASELINES: dict[Name, Callable[[Conversion], Contender]] = {
    "from_kv_blocks": from_kv_blocks,
    "eager lists": eager_lists,
    "create_block_mask": compiled_create_block_mask,
    "attn_gym": attn_gym_vsa,
    "flashinfer": flashinfer_plan,
}


def measured(name: Name, made: Conversion) -> dict[str, Any]:
    """The cost of a baseline and its ``note``, or in ``reason`` why there is none."""
    record: dict[str, Any] = {"name": name, "note": None, "reason": None, "cost": None}
    try:
        contender = BASELINES[name](made)
        record["note"] = contender.note
        record["cost"] = cost(contender.call, made.problem.device)._asdict()
    except UnfitError as why:
        record["reason"] = str(why)
    except Exception as error:  # somebody else's code: its failure is a cell of the table
        record["reason"] = first_line(error)
    return record


def _map_of(indices: Tensor, columns: int) -> Tensor:
    """bool ``[B, H, R, columns]`` of indices within them, -1 for none."""
    # One column more, for what is no candidate.
    present = torch.zeros(
        (*indices.shape[:3], columns + 1), dtype=torch.bool, device=indices.device
    )
    slot = torch.where(indices < 0, columns, indices).to(torch.int64)
    return present.scatter_(-1, slot, True)[..., :columns]


def _tiles(chosen: Tensor, blocks: tuple[int, int], span: Span) -> tuple[Tensor, Tensor]:
    """``[B, H, R, C]`` of blocks as maps of tiles: any block of a tile, and all of them."""
    some = every = chosen
    sides = zip((-2, -1), blocks, span[2:], span.tiles, strict=True)
    for axis, block, tile, count in sides:
        if block >= tile:
            if block > tile:
                some, every = (
                    m.repeat_interleave(block // tile, axis).narrow(axis, 0, count)
                    for m in (some, every)
                )
            continue
        inside = min(tile // block, chosen.shape[axis])
        missing = count * inside - chosen.shape[axis]
        pad = (0, missing) if axis == -1 else (0, 0, 0, missing)
        some, every = (
            torch.nn.functional.pad(m, pad, value=value) if missing else m
            for m, value in ((some, False), (every, True))
        )
        some = some.unflatten(axis, (count, inside)).any(axis)
        every = every.unflatten(axis, (count, inside)).all(axis)
    return some, every


def _arguments(made: Conversion) -> dict[str, Any]:
    layout, grid = made.layout, made.problem.grid
    return {
        "BLOCK_SIZE": layout.block_size,
        "mask_mod": layout.mask_mod,
        "seq_lengths": (grid.q_len, grid.kv_len),
        "compute_q_blocks": made.problem.training,
    }


def _installed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        raise UnfitError(
            f"{package} is not installed" if missing else f"{package} does not import: {error}"
        ) from None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # What the allocator keeps for later is free too.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
