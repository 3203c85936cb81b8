"""Find a proved program for the ranks: trace, let the user's choices fix what they fix, search."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import nn

from autotp.ownership.choices import Choices
from autotp.ownership.engine import Ownership
from autotp.record import Trace
from autotp.search import Analysis, Refold, Search
from autotp.trace import draws, trace

Force = Callable[[dict[str, dict[int, str]]], dict[str, int | None]]


def analyse(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    force: Force | None = None,
    record: Trace | None = None,
    closed: Collection[str] = (),
) -> Analysis:
    """Find a proved program for ``tp`` ranks, from a record of the model's run if there is one already.

    ``force`` may fix the cut of parameters (None: whole): it gets what each dim of each parameter is to its layer.
    The outputs of the modules ``closed`` are gathered in any case.
    """
    record = record or trace(model, args, kwargs)
    record.draws = draws(model, args, kwargs, record)
    try:
        return _search(model, args, kwargs, tp, force, record, closed)
    except Refold:
        full = trace(model, args, kwargs, fold=False, drive=record.drive)
        full.draws = record.draws
        return _search(model, args, kwargs, tp, force, full, closed)


def _search(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    force: Force | None,
    record: Trace,
    closed: Collection[str],
) -> Analysis:
    dims: dict[str, int | None] = {}
    if force is not None:
        free = Ownership(record, tp, Choices()).run()
        picked = {t: {d: "picked"} for t, d in free.picked.items()}
        dims = force({name: {**picked.get(t, {}), **free.roles.get(t, {})} for name, t in record.leaves.items()})
    forced: dict[int, int | None] = {}
    for name, d in dims.items():
        tid = record.leaves[name]
        if record.folds and record.skipped and forced.get(tid, d) != d:
            raise Refold  # blocks that are alike are to be cut differently
        forced[tid] = d
    if record.folds and record.skipped and len(dims) != sum(t in forced for t in record.leaves.values()):
        raise Refold
    gather = frozenset(t for m in record.modules if m.path in closed for t in m.outputs.values())
    notes = dict.fromkeys(gather, "by choice")
    found = Search(model, args, kwargs, record, tp, Choices(forced, gather, record.shut), notes).run()
    return replace(found, chosen=frozenset(forced))
