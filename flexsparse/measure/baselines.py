"""What others do instead of this library's conversion, each timed in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from flexsparse.measure.contender import Contender, UnfitError
from flexsparse.measure.conversion import Conversion
from flexsparse.measure.cost import cost, first_line
from flexsparse.measure.peers import attn_gym_vsa, flashinfer_plan
from flexsparse.measure.torch_masks import compiled_create_block_mask, eager_lists, from_kv_blocks

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
        record["cost"] = cost(contender.call, made.problem.device, contender.no_graph)._asdict()
    except UnfitError as why:
        record["reason"] = str(why)
    except Exception as error:  # somebody else's code: its failure is a cell of the table
        record["reason"] = first_line(error)
    return record
