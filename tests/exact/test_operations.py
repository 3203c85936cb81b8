"""Operations one by one, between two layers: exact in float64 and cut (tests/models/operations*.py)."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankPool
from tests.models.operations import Case, check, measured
from tests.models.operations_along import ALONG
from tests.models.operations_at_rest import AT_REST
from tests.models.operations_experts import EXPERTS
from tests.models.operations_functions import FUNCTIONS
from tests.models.operations_norm import NORM
from tests.models.operations_scatter import SCATTER
from tests.models.operations_taught import TAUGHT
from tests.models.operations_tried import TRIED

pytestmark = pytest.mark.slow

CASES: dict[str, Case] = {**SCATTER, **NORM, **AT_REST, **ALONG, **TAUGHT, **TRIED, **FUNCTIONS, **EXPERTS}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """One case on this rank."""
    return measured(CASES[payload["name"]], payload["tp"])


def _parameters() -> list[object]:
    pairs = [(n, c, tp) for n, c in CASES.items() for tp in c.tp]
    return [pytest.param(n, tp, marks=[pytest.mark.long] * c.long) for n, c, tp in pairs]


@pytest.mark.parametrize(("name", "tp"), _parameters())
def test_operation(ranks: RankPool, name: str, tp: int) -> None:
    check(ranks.run("tests.exact.test_operations:run", {"name": name, "tp": tp})[0], CASES[name])


def test_shared_norms_have_torchs_precision(ranks: RankPool) -> None:
    """Statistics in float32, result in the dtype that torch gives, torch's own default for eps."""
    found = ranks.run("tests.models.operations_norm:low_precision", {})[0]
    for name, (got, wanted, error) in found.items():
        assert got == wanted, name
        assert error < 0.02, (name, error)
