"""K44: a cache with room for all tokens, a prefill, and one token at a time."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import SECONDS, is_named

pytestmark = pytest.mark.slow
both = pytest.mark.parametrize("tp", [2, 4])
where = pytest.mark.parametrize("inside", [False, True], ids=["given", "in buffers"])


def found(ranks: RankPool, task: str, tp: int, inside: bool, **payload: Any) -> list[Any]:
    """What the ranks of the mesh answer."""
    payload = {"tp": tp, "inside": inside, **payload}
    answers: list[Any] = ranks.run(f"tests.cases.tasks_cache:{task}", payload, timeout=2 * SECONDS)
    return answers[:tp]


@both
@where
def test_k44_greedy_loop(ranks: RankPool, tp: int, inside: bool) -> None:
    exact(found(ranks, "decoded", tp, inside), tp, inside)


@where
def test_k44_a_step_that_takes_another_path_than_the_prefill(ranks: RankPool, inside: bool) -> None:
    for answer in found(ranks, "decoded", 2, inside, apart=True):
        is_named(answer["refused"], "modules_cache.py", "sample")
    exact(found(ranks, "decoded", 2, inside, apart=True, driven=True), 2, inside)


def exact(answers: list[Any], tp: int, inside: bool) -> None:
    """The tokens of the unsharded model on all ranks."""
    assert len({tuple(map(tuple, a["tokens"])) for a in answers}) == 1
    assert len({t for row in answers[0]["tokens"] for t in row[5:]}) > 4, "one token over and over proves little"
    for answer in answers:
        assert answer["equal"] == [True, True]
        assert max(answer["errors"]) <= 1e-10
        if inside and answer["heads"] % tp == 0:
            assert answer["held"] == 1 / tp, "the cache is not cut"


@where
def test_k44_sampling_with_a_seed_per_rank(ranks: RankPool, inside: bool) -> None:
    answers = found(ranks, "drawn", 2, inside)
    assert answers[0] == answers[1]
    assert answers[0]["tokens"][0] != answers[0]["tokens"][1]
