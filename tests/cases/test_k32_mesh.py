"""K32: meshes of all kinds, and calls in the wrong order."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import SECONDS, is_equal, is_named

pytestmark = pytest.mark.slow


def found(ranks: RankPool, task: str, **payload: Any) -> Any:
    """What all ranks answer."""
    return ranks.run(f"tests.cases.tasks_mesh:{task}", payload, timeout=SECONDS)


def test_two_axes_without_names_are_refused(ranks: RankPool) -> None:
    for answer in found(ranks, "on_mesh", shape=(2, 2), names=None):
        is_named(answer["refused"], "names", "tp", 2)


def test_the_axis_named_tp_is_taken(ranks: RankPool) -> None:
    for answer in found(ranks, "on_mesh", shape=(2, 2), names=("dp", "tp"), options={"fsdp": False}):
        is_equal(answer)
        assert answer["cut_share"] == 1.0


def test_unknown_axes_are_refused(ranks: RankPool) -> None:
    for answer in found(ranks, "on_mesh", shape=(2, 2), names=("pipeline", "tp")):
        is_named(answer["refused"], "pipeline", "dp")


def test_a_single_axis_may_have_any_name(ranks: RankPool) -> None:
    answers = found(ranks, "on_mesh", shape=(2,), names=("model",))
    is_equal(answers[0])
    assert answers[0]["cut_share"] == 1.0


def test_one_rank_is_a_no_op(ranks: RankPool) -> None:
    answer = found(ranks, "size_one")[0]
    assert answer["same"]
    assert answer["output"] == answer["expected"]


def test_three_ranks_of_four(ranks: RankPool) -> None:
    answers = found(ranks, "on_mesh", shape=(3,), names=("tp",))
    if "refused" in answers[0]:
        is_named(answers[0]["refused"], "fc", 32, 3)
    else:
        is_equal(answers[0])


def test_a_part_of_a_larger_mesh(ranks: RankPool) -> None:
    answers = found(ranks, "on_mesh", shape=(2, 2), names=("dp", "tp"), part="tp")
    for answer in answers:
        is_equal(answer)
        assert answer["cut_share"] == 1.0
    assert [answer["coordinate"] for answer in answers] == [(0,), (1,), (0,), (1,)]


def test_fully_shard_first_is_refused(ranks: RankPool) -> None:
    for answer in found(ranks, "fsdp_first"):
        is_named(answer["refused"], "fully_shard", "before")


@pytest.mark.parametrize("tp", [2, 4])
def test_a_second_call_cuts_nothing_more(ranks: RankPool, tp: int) -> None:
    answer = found(ranks, "twice", tp=tp)[0]
    is_equal(answer)
    assert answer["twice"] == answer["once"]
    for text in answer["refusals"]:
        is_named(text, "already")


def test_another_device_is_refused(ranks: RankPool) -> None:
    answers = found(ranks, "other_device")
    for answer in answers[:2]:
        is_named(answer["refused"], "cpu", "cuda")
