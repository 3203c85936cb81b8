"""A fixed sample of architectures, sharded over two ranks, against themselves: all outputs, all gradients."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.zoo.architectures import ARCHITECTURES

pytestmark = pytest.mark.slow

LIMIT = 1e-9
SHARE = 0.95


SLOW = {"tv:wide_resnet50_2", "timm:convmixer_768_32", "timm:resnext50_32x4d"}  # what they show, smaller ones show too


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in ARCHITECTURES])
def test_sharded_architecture_is_exact(ranks: RankPool, name: str) -> None:
    payload = {"name": name, "tp": 2, "builder": "tests.zoo.architectures:build", "settings": {"step": False}}
    figures = ranks.run("tests.harness.tasks:measure_model", payload)[0]
    assert figures["promoted"], f"{name} did not run in float64 all the way: {figures['obstacle']}"
    assert not figures["problems"], "\n".join(figures["problems"])
    for what in ("forward_error", "gradient_error", "spread"):
        assert figures[what] <= LIMIT, f"{what} {figures[what]}: {figures['first_bad']} {figures['wrong_gradients']}"
    assert figures["cut_share"] >= SHARE, f"only {figures['cut_share']:.1%} of the weight bytes are cut"


def test_the_sample_is_large() -> None:
    assert len(ARCHITECTURES.keys() - SLOW) >= 60
    assert ARCHITECTURES.keys() >= SLOW
