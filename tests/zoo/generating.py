"""Generation of one entry of the zoo: planned once per tensor-parallel size, then run on forked ranks."""

from __future__ import annotations

import copy
import time
from typing import Any

from torch import nn

from autotp import generation, sharding, structures
from autotp.comparing import cut_share
from autotp.extending import Dealt
from autotp.generation import Planned
from autotp.measuring import Inputs, Settings
from autotp.mesh import as_mesh_axes
from autotp.planning import Prepared, prepare
from autotp.promotion import widen, widen_model
from autotp.ranks import RankPool
from tests.harness.generating import CACHES, Expected, compared, expected, given, worst
from tests.harness.tasks import mesh_of
from tests.zoo.entry import build, settled


def records(zoo: str, name: str, sizes: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """One record per size, with figures for each kind of cache, or one status for all if it did not get that far."""
    base: dict[str, Any] = {"name": name}
    try:
        model, inputs = build(zoo, name)
        if not (callable(getattr(model, "can_generate", None)) and model.can_generate()):
            return [{**base, "tp": tp, "status": "no generation"} for tp in sizes]
        wanted = expected(model.eval(), inputs)
    except Exception as error:
        return [{**base, "tp": tp, "status": "broken", "text": str(error)} for tp in sizes]
    return [_record({**base, "tp": tp}, model, inputs, wanted, seconds) for tp in sizes]


def _record(
    record: dict[str, Any], model: nn.Module, inputs: Inputs, wanted: Expected, seconds: float
) -> dict[str, Any]:
    settings, tp = wanted.settings, record["tp"]
    record.update(promoted=settings.promote, obstacle=settings.obstacle, call=sorted(wanted.call))

    def measured() -> dict[str, Any]:
        start = time.perf_counter()
        wide = widen_model(copy.deepcopy(model), settings.dtype)
        prepared = _prepared(wide, inputs, tp, settings)
        planned = _planned(wide, wanted, tp, Dealt.by(prepared.analysis))
        record["plan_seconds"] = round(time.perf_counter() - start, 2)
        with RankPool(tp, timeout=seconds) as pool:
            return dict(pool.run_forked(_on_rank, (wide, wanted, tp, prepared, planned))[0])

    return settled(record, measured)


def _prepared(model: nn.Module, inputs: Inputs, tp: int, settings: Settings) -> Prepared:
    with settings.mode():
        sample = structures.map_tensors(inputs, lambda t: widen(t.detach(), settings.dtype))
        return prepare(model, as_mesh_axes(tp), sample=sample)


def _planned(model: nn.Module, wanted: Expected, tp: int, dealt: Dealt) -> dict[Any, list[Planned]]:
    """As every rank would plan it at its first call."""
    plans: dict[Any, list[Planned]] = {}
    for kind, options in CACHES.items():
        if not isinstance(wanted.outputs[kind], str):
            kwargs = {**given(wanted.call, wanted.settings), **wanted.options, **options}
            with wanted.settings.mode():
                mode = generation.mode_of(model, (), kwargs)
                plans[mode] = [generation.plan_generate(model, (), kwargs, tp, dealt)]
    return plans


def _on_rank(payload: tuple[nn.Module, Expected, int, Prepared, dict[Any, list[Planned]]]) -> dict[str, Any]:
    model, wanted, tp, prepared, planned = payload
    mesh = mesh_of(tp)
    with wanted.settings.mode():
        sharded = sharding.apply(model, mesh, prepared)
    known = generation.generation_of(sharded)
    if known is not None:
        known.planned.update({mode: list(some) for mode, some in planned.items()})
    share = cut_share(sharded)
    figures = worst({kind: compared(sharded, wanted, kind) for kind in CACHES}, mesh.get_group())
    replanned = known is not None and known.planned != planned
    obstacles = [p.obstacle for some in planned.values() for p in some if p.obstacle]
    return {**figures, "cut_share": share, "replanned": replanned, "obstacles": obstacles}
