"""K33: build on meta, shard, draw values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import SECONDS

pytestmark = pytest.mark.slow


def found(ranks: RankPool, *shape: int, seed: int = 0) -> list[dict[str, Any]]:
    """What the ranks of the mesh answer."""
    answers = ranks.run("tests.cases.tasks_meta:drawn", {"shape": shape, "seed": seed}, timeout=SECONDS)
    return [answer for answer in answers if answer is not None]


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_k33_drawn(ranks: RankPool, shape: tuple[int, ...]) -> None:
    answers = found(ranks, *shape)
    assert len(answers) == math.prod(shape)
    for answer in answers:
        assert answer["meta"] == answer["nan"] == answer["buffers"] == []
        assert {"up.weight", "up.bias", "down.weight"} <= set(answer["cut"])
        assert answer["twins"] == [], "two ranks hold the same numbers"
        assert answer["torn"] == [], "a whole parameter differs between ranks"
        assert answer["unlike"] == [], "not the values of an unsharded build"
        assert answer["error"] <= 1e-5
        for name, fan_in in (("up.weight", 64), ("down.weight", 256)):
            assert answer["std"][name] == pytest.approx(1 / math.sqrt(3 * fan_in), rel=0.05)


def test_k33_values_follow_from_the_seed_alone(ranks: RankPool) -> None:
    two, four, other = (found(ranks, tp, seed=seed)[0]["values"] for tp, seed in ((2, 1), (4, 1), (2, 2)))
    assert two == four
    assert two["up.bias"] != other["up.bias"]
