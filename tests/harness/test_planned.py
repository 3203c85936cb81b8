"""Planning on one rank for all: the others do not plan, and hold the same; what cannot be sent every rank plans."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from autotp import planning
from autotp.errors import RuleError
from autotp.ranks import RankPool
from tests.harness import planned
from tests.harness.tasks import autotp_shard, mesh_of
from tests.models import registry

pytestmark = pytest.mark.slow
TASK = f"{__name__}:sharded"


def sharded(payload: dict[str, Any]) -> tuple[int, Any] | None:
    """How often this rank has planned, and the plan it has."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = registry.build("user:nanogpt")
    with (
        patch.object(planning, "analyse", wraps=planning.analyse) as analyse,
        patch.object(planned, "packed", planned.packed if payload.get("sent", True) else _refuse),
        planned.planned_once(mesh) as found,
    ):
        autotp_shard(model, mesh, (args, kwargs), rules=payload.get("rules"))
    model(*args, **kwargs)
    return analyse.call_count, found[0].plan


def _refuse(made: object) -> bytes:
    raise TypeError("it cannot be sent")


@pytest.mark.parametrize(("sent", "times"), [(True, [1, 0]), (False, [1, 1])])
def test_one_rank_plans_if_what_it_makes_can_be_sent(ranks: RankPool, sent: bool, times: list[int]) -> None:
    (first, plan), (second, other) = ranks.run(TASK, {"sent": sent})[:2]
    assert [first, second] == times
    assert plan == other and any(row.is_cut for row in plan.parameters)


def test_a_refusal_is_that_of_every_rank(ranks: RankPool) -> None:
    with pytest.raises(RuleError, match=r"nothing\.weight"):
        ranks.run(TASK, {"rules": {"nothing.weight": "colwise"}})
