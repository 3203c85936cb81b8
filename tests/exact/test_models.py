"""Every model of tests/models, sharded over 2 and 4 ranks, against itself: all outputs, all gradients, all state."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.models import registry

pytestmark = pytest.mark.slow

FORWARD, GRADIENTS, STEP = 1e-10, 1e-9, 1e-9


def _parameters() -> list[object]:
    # On two ranks all but two, whose kinds others show in less time
    slow = {"tv:efficientnet_b0", "tv:resnet50"}
    pairs = [(name, tp) for tp in (2, 4) for name in registry.names()]
    return [
        pytest.param(name, tp, id=f"{name}-tp{tp}", marks=[pytest.mark.long] * (tp == 4 or name in slow))
        for name, tp in pairs
    ]


@pytest.mark.parametrize(("name", "tp"), _parameters())
def test_sharded_model_is_exact(ranks: RankPool, name: str, tp: int) -> None:
    figures = ranks.run("tests.harness.tasks:measure_model", {"name": name, "tp": tp})[0]
    assert figures["promoted"], f"{name} did not run in float64 all the way; rounding may hide wrong values"
    assert not figures["problems"], "\n".join(figures["problems"])
    assert figures["forward_error"] <= FORWARD, f"outputs are off by {figures['forward_error']}: {figures['first_bad']}"
    worst = f"{figures['first_bad']}\n" + "\n".join(figures["wrong_gradients"])
    assert figures["gradient_error"] <= GRADIENTS, f"gradients are off by {figures['gradient_error']}: {worst}"
    assert figures["spread"] <= STEP, f"ranks differ by {figures['spread']} in outputs or uncut values"
    assert figures["optimizer_error"] <= STEP, f"after an AdamW step values are off by {figures['optimizer_error']}"
    wanted = registry.ENTRIES[name].share
    assert figures["cut_share"] >= wanted, f"only {figures['cut_share']:.1%} of the weight bytes are cut"
