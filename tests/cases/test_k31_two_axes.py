"""K31: tensor parallelism, then FSDP2, in sizes that divide and in sizes that do not."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import SECONDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", ["K31 32 10", "K31 13 7"])
def test_a_step_on_halves_is_that_of_the_whole_batch(ranks: RankPool, recipe: str) -> None:
    payload = {"builder": "tests.cases.tasks:built", "model": recipe, "names": ("dp", "tp")}
    for found in ranks.run("tests.harness.two_axes:train_step", payload, timeout=SECONDS):
        assert found["kept"], "gathered weights are not the original ones"
        assert found["names"], "names change with the first forward"
        assert found["gradient"] <= 1e-12
        assert max(found["norms"]) <= 1e-12
        assert max(found["steps"]) <= 1e-9
        assert found["held"] <= 0.35, "four ranks share the weights"
