"""Programs for another run of a model whose weights are laid out already: the layout is a fact, all else is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autotp.at_rest import keep_at_rest
from autotp.errors import ProofError
from autotp.held import Cut, Layouts
from autotp.ownership.choices import Choices, Room
from autotp.ownership.engine import FIRST_NODE
from autotp.record import Trace
from autotp.search import Analysis, Refold, Search
from autotp.trace import trace
from autotp.trees import Ref


@dataclass(frozen=True)
class Dealt:
    """How the leaves of a model are laid out, by name: those used in parts, and those only kept in parts."""

    used: dict[str, Cut]
    kept: dict[str, Cut]

    @classmethod
    def by(cls, found: Analysis) -> Dealt:
        """As an analysis has dealt them."""
        cuts = {name: (tid, found.dealing.sets(tid)) for name, tid in found.trace.leaves.items()}
        kept = {name: s for name, (tid, s) in cuts.items() if s and tid in found.dealing.at_rest}
        return cls({name: s for name, (_, s) in cuts.items() if s and name not in kept}, kept)


def extend(model: nn.Module, record: Trace, args: Any, kwargs: Any, tp: int, dealt: Dealt) -> Analysis:
    """Find a proved program for what was recorded.

    Raises:
        ProofError: none could be proved.
    """
    record.draws = record.random_calls > 0
    used, kept = dict(dealt.used), dict(dealt.kept)
    while True:
        try:
            found = _searched(model, record, args, kwargs, tp, used)
        except (Refold, ProofError):
            if not record.skipped:
                raise
            full = trace(model, args, kwargs, False, record.drive, record.held)
            return extend(model, full, args, kwargs, tp, dealt)
        reached = _reached(record)
        unread = {name: cut for name, cut in used.items() if record.leaves[name] not in reached}
        refused = keep_at_rest(found, {record.leaves[n]: cut for n, cut in {**kept, **unread}.items()})
        moved = [n for n in kept if record.leaves[n] in refused]
        if not moved:
            return found
        used.update({n: kept.pop(n) for n in moved})


def _searched(model: nn.Module, record: Trace, args: Any, kwargs: Any, tp: int, used: dict[str, Cut]) -> Analysis:
    laid = {record.leaves[name]: next(iter(cut.items())) for name, cut in used.items()}
    params = {tid for tid in record.leaves.values() if record.tensors[tid].parameter}
    dims = {tid: laid[tid][0] if tid in laid else None for tid in params}
    room: dict[int, Room | None] = {t: _part(record, t, cut) for t, cut in record.given.items()}
    return Search(model, args, kwargs, record, tp, Choices(dims, opaque=record.shut, dealt=laid, room=room)).run()


def _reached(record: Trace) -> set[int]:
    """The leaves that some call read, or a module of which ran."""
    ran = {m.path for m in record.modules}
    read = {x.tid for c in record.calls for x in c.leaves if isinstance(x, Ref)}
    return read | {t for op in record.ops for t in op.ins} | {
        tid for name, tid in record.leaves.items() if name.rpartition(".")[0] in ran
    }  # fmt: skip


def _part(record: Trace, tid: int, cut: Cut) -> Room:
    """The owners of a tensor that the ranks have parts of from before; the first nodes stand for the ranks."""
    shape = record.tensors[tid].shape
    nodes = np.zeros([n if d in cut else 1 for d, n in enumerate(shape)], dtype=np.int64)
    for rank in range(len(next(iter(cut.values())))):
        mine: list[Sequence[int]] = [cut[d][rank] if d in cut else [0] for d in range(len(shape))]
        nodes[np.ix_(*mine)] = FIRST_NODE + rank
    return Room(torch.from_numpy(nodes))


def layouts_of(found: Analysis) -> Layouts:
    """How the tensors are laid out that objects (caches) hold at the end of the recorded run."""
    trace = found.trace
    sets = {place: found.dealing.sets(trace.like.get(t, t)) for place, t in trace.kept.items()}
    return {place: dict(cuts) for place, cuts in sets.items() if cuts}
