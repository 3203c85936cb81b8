"""K23, K26: sequence parallelism, for lengths that do not divide and for norm weights."""

from __future__ import annotations

import pytest

from autotp.planning import plan
from autotp.ranks import RankPool
from tests.cases.checks import equal
from tests.cases.tasks import built

pytestmark = pytest.mark.slow
SP = {"sequence_parallel": True}


@pytest.mark.parametrize(("length", "tp"), [(7, 2), (7, 4), (3, 4), (1, 2)])
def test_k23_sequence_length(ranks: RankPool, length: int, tp: int) -> None:
    """Uneven slices; with fewer tokens than ranks, none (and no hang)."""
    equal(ranks, f"K23 {length}", tp, options=SP)


@pytest.mark.parametrize("tp", [2, 4])
def test_k26_norm_weights(ranks: RankPool, tp: int) -> None:
    equal(ranks, "K26", tp, options=SP)
    model, args, kwargs = built("K26")
    styles = {row.name: row.style for row in plan(model, tp=tp, sample=(args, kwargs), **SP).parameters}
    assert styles["norms.1.weight"] == styles["norms.1.bias"] == "sequence_parallel"
