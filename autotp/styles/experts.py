"""A call that a rank makes with its own experts only; the rows of all others are zero, and so are their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.call_edits import ExpertsEdit
from autotp.trees import rebuild


def of_experts(edit: ExpertsEdit, rank: int, func: Any, leaves: list[Any], spec: Any) -> Tensor:
    """What ``func`` gives for the rows of this rank's experts, in full size."""
    mine = edit.parts[rank]
    of = 1 + max(max(p) for p in edit.parts if len(p))
    given = list(leaves)

    def call() -> Tensor:
        args, kwargs = rebuild(given, spec)
        result: Tensor = func(*args, **kwargs)
        return result

    if edit.rows is None:
        place = _places(mine, of, leaves[edit.weight].device)
        local = place[leaves[edit.index]]  # of a negative index too
        given[edit.index] = local.clamp(min=0)
        out = call()
        missing = local < 0
        return out.masked_fill(missing.reshape(*missing.shape, *[1] * (out.ndim - missing.ndim)), 0)
    x, ends = leaves[edit.rows], leaves[edit.index]
    order, local_ends, own = _first(mine, of, x.shape[0], ends)
    given[edit.index] = local_ends
    given[edit.rows] = x.index_select(0, order).masked_fill(~own, 0)  # what lies behind the ends has no gradient
    out = call().masked_fill(~own, 0)  # nor a value
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return out.index_select(0, back)


def _places(mine: Sequence[int], of: int, device: torch.device) -> Tensor:
    """Where among its own experts a rank has each of all; -1 for those of other ranks."""
    place = torch.full((of,), -1, dtype=torch.int64, device=device)
    place[torch.tensor(mine, dtype=torch.int64, device=device)] = torch.arange(len(mine), device=device)
    return place


def _first(mine: Sequence[int], of: int, n: int, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order of ``n`` rows that has those of a rank's experts first, the ends of each, and which rows are own."""
    rows = torch.arange(n, device=ends.device)
    expert = torch.bucketize(rows, ends, right=True)  # past the last end: of none
    place = torch.cat([_places(mine, of, ends.device), rows.new_full((1,), -1)])
    order = torch.argsort(place[expert] < 0, stable=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    local_ends = counts[torch.tensor(mine, device=ends.device)].cumsum(0).to(ends.dtype)
    return order, local_ends, (rows < local_ends[-1]).unsqueeze(1)
