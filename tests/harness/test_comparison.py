"""The comparison itself: it passes what is right and catches what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankError, RankPool

pytestmark = pytest.mark.slow


def figures(ranks: RankPool, name: str) -> dict[str, Any]:
    """What rank 0 measures for one way to shard."""
    found: dict[str, Any] = ranks.run("tests.harness.standin_task:run", name, timeout=60)[0]
    return found


def test_right_sharding_passes(ranks: RankPool) -> None:
    found = figures(ranks, "right")
    assert found["ok"], found
    assert found["forward_error"] < 1e-14
    assert found["gradient_error"] < 1e-14
    assert 0.9 < found["cut_share"] < 1.0


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("scale_gradient_partial", "scale: its gradient differs"),
        ("norm_off", "norm: its output differs"),
        ("ranks_differ", "head: its output differs"),
        ("gradient_on_one_rank", "norm.weight: its gradient differs"),
        ("frozen", "norm.weight: its gradient differs"),
    ],
)
def test_wrong_value_is_located(ranks: RankPool, name: str, where: str) -> None:
    found = figures(ranks, name)
    assert not found["ok"]
    assert found["first_bad"].startswith(where)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("weights_changed", "head.bias: the gathered values are not the original ones"),
        ("ranks_differ", "head.bias: the gathered values are not the original ones (only on rank 1)"),
        ("output_is_dtensor", "output logits is a DTensor"),
        ("frozen", "norm.weight: (first name, requires_grad, dtype)"),
        ("gradient_on_one_rank", "ranks differ in norm.weight"),
        ("untied", "tied.weight: (first name, requires_grad, dtype)"),
        ("renamed", "state_dict lost"),
    ],
)
def test_problem_is_named(ranks: RankPool, name: str, text: str) -> None:
    assert any(text in problem for problem in figures(ranks, name)["problems"])


def test_disagreement_shows_in_the_spread(ranks: RankPool) -> None:
    assert figures(ranks, "ranks_differ")["spread"] > 1e-4


def test_one_rank_that_raises_ends_all(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 gives up") as caught:
        figures(ranks, "raises_on_one")
    assert list(caught.value.failures) == [1]
