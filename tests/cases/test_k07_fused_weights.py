"""K07, K09, K35, K40: packed, transposed, shared, parametrised and adapted weights."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import equal, equal_and_split, equal_or_named

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("tp", [2, 4])]


def test_k07_fused_qkv(ranks: RankPool, tp: int) -> None:
    equal_and_split(ranks, "K07", tp)


@pytest.mark.parametrize("recipe", ["K09", "K09 interleaved", "K09 36"])
def test_k09_packed_gate_and_up(ranks: RankPool, tp: int, recipe: str) -> None:
    equal_and_split(ranks, recipe, tp)


def test_k09_35_rows_cannot_be_divided(ranks: RankPool, tp: int) -> None:
    equal_or_named(ranks, "K09 35", tp, "gate_up", 35, tp)


@pytest.mark.parametrize("recipe", ["K35 shared", "K35 view"])
def test_k35_shared_and_transposed_storage(ranks: RankPool, tp: int, recipe: str) -> None:
    equal_and_split(ranks, recipe, tp)


@pytest.mark.parametrize("recipe", ["K35 transposed", "K35 weight norm"])
def test_k35_own_linear_and_parametrised(ranks: RankPool, tp: int, recipe: str) -> None:
    equal_or_named(ranks, recipe, tp, "fc")


def test_k40_adapters_added_before(ranks: RankPool, tp: int) -> None:
    found = equal(ranks, "K40", tp, held=["*.base.weight"])
    assert found["held"] <= {2: 0.6, 4: 0.4}[tp]
