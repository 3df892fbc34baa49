"""That what is not listed is not read: NaN in its place changes no bit of the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexsparse.measure.conversion import Conversion

# Rows of tiles that are each looked at by itself.
_ROWS = 4


def unlisted(made: Conversion) -> dict[str, Any]:
    """Fills keys and values of tiles with NaN, and compares outputs bit by bit.

    In one pass those that no row of a KV head lists; then, for some rows of tiles spread over all,
    those that this row does not list, where only its own output counts. ``tiles`` were filled in all
    passes, over all KV heads; ``equal`` is None where every tile is listed everywhere. `dense` visits
    no tiles and clears only what nobody sees: it gets the first pass alone.
    """
    plan, layout = made.plan, made.layout_of_plan
    assert plan is not None and made.qkv is not None
    q, k, v = (x.detach() for x in made.qkv)
    address, batch = plan.address, plan.grid.batch
    partial, full = layout.tile_maps()
    heads, kv_heads = address.kernel_heads
    listed = (partial | full).expand(address.kernel_batch(batch), heads, -1, -1)
    # A KV head's tile is read by any of its query heads.
    listed = listed.unflatten(1, (kv_heads, heads // kv_heads)).any(2)
    rows, tile = listed.shape[2], layout.block_size[0]
    spread = sorted({round(i * (rows - 1) / (_ROWS - 1)) for i in range(_ROWS)})
    passes: list[tuple[Tensor, slice]] = [(~listed.any(2), slice(None))]
    if plan.backend != "dense":
        passes += [(~listed[:, :, r], slice(r * tile, (r + 1) * tile)) for r in spread]

    def attended(k: Tensor, v: Tensor) -> Tensor:
        return address.pack(plan.run(q, k, v, layout).out.contiguous(), "q")

    with torch.no_grad():
        before = attended(k, v)
        tiles, equal = 0, True
        for hidden, span in passes:
            if not (filled := int(hidden.sum())):
                continue
            tiles += filled
            keys = hidden.repeat_interleave(layout.block_size[1], -1)[..., : plan.grid.kv_len, None]
            given = []
            for name, x in (("k", k), ("v", v)):
                copy = x.clone()
                # The kernel's view of the copy: filled where a kernel would look.
                address.pack(copy, name).masked_fill_(keys, torch.nan)
                given.append(copy)
            after = attended(given[0], given[1])
            equal &= torch.equal(before[:, :, span], after[:, :, span])
    return {"tiles": tiles, "equal": equal if tiles else None}
