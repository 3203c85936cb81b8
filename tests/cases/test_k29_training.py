"""K12, K15, K16, K29, K42: ties, dropout, different starts, clipping, optimizers, recomputation."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import SECONDS, equal, equal_and_split, is_equal, is_named, result

pytestmark = pytest.mark.slow
both = pytest.mark.parametrize("tp", [2, 4])


def found(ranks: RankPool, task: str, **payload: Any) -> Any:
    """What all ranks answer."""
    return ranks.run(f"tests.cases.tasks_training:{task}", payload, timeout=SECONDS)


@both
def test_k12_tied_embedding_and_head(ranks: RankPool, tp: int) -> None:
    equal_and_split(ranks, "K12", tp)


@both
def test_k15_without_dropout_in_eval_mode(ranks: RankPool, tp: int) -> None:
    equal_and_split(ranks, "K15", tp, settings={"dropout": True})


@pytest.mark.parametrize("by_rank", [False, True], ids=["seeded alike", "seeded by rank"])
@pytest.mark.parametrize("dp", [1, 2])
def test_k15_dropout_masks(ranks: RankPool, dp: int, by_rank: bool) -> None:
    answers = found(ranks, "dropout", dp=dp, by_rank=by_rank)
    groups = [answers[i : i + 4 // dp] for i in range(0, 4, 4 // dp)]
    for group in groups:
        first = group[0]
        assert all(answer["outputs"] == first["outputs"] for answer in group), "ranks of a tp group differ"
        assert all(answer["gradients"] == first["gradients"] for answer in group)
        assert {"head.weight", "head.bias", "down.bias"} & set(first["gradients"])
        assert len({answer["seen"]["inner"] for answer in group}) == len(group), "two ranks dropped the same features"
        assert len({answer["seen"]["outer"] for answer in group}) == 1
    assert len({group[0]["seen"]["outer"] for group in groups}) == dp, "dp ranks dropped the same features"
    for answer in answers:
        assert answer["outputs"][0] == answer["outputs"][1], "the same seed gave another result"


@both
def test_k16_ranks_that_start_different(ranks: RankPool, tp: int) -> None:
    for answer in found(ranks, "different_start", tp=tp)[:tp]:
        if "refused" in answer:
            is_named(answer["refused"], "ranks", "differ")
        else:
            assert answer["wrong"] == []
            assert answer["spread"] <= 1e-6


@both
@pytest.mark.parametrize("clip", [None, False, True], ids=["default", "loop", "foreach"])
def test_k29_clipping(ranks: RankPool, tp: int, clip: bool | None) -> None:
    answer = found(ranks, "train", recipe="K29", tp=tp, foreach=clip)[0]
    assert answer["norm_error"] <= 1e-10
    assert answer["parameter_error"] <= 1e-9


@both
@pytest.mark.parametrize("adamw", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_k29_optimizers(ranks: RankPool, tp: int, adamw: dict[str, bool]) -> None:
    answer = found(ranks, "train", recipe="K29", tp=tp, adamw=adamw)[0]
    assert answer["parameter_error"] <= 1e-9


@both
def test_k12_training_keeps_the_tie(ranks: RankPool, tp: int) -> None:
    answer = found(ranks, "train", recipe="K12", tp=tp)[0]
    assert answer["norm_error"] <= 1e-10
    assert answer["parameter_error"] <= 1e-9


@both
@pytest.mark.parametrize("recipe", ["K42", "K42 attention", "K42 mlp"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_k42_recomputed_before(ranks: RankPool, tp: int, recipe: str, sequence_parallel: bool) -> None:
    equal(ranks, recipe, tp, train=True, options={"sequence_parallel": sequence_parallel})


@both
@pytest.mark.parametrize("blocks", [["attention"], ["mlp"], ["attention", "mlp"]], ids=str)
def test_k42_recomputed_after(ranks: RankPool, tp: int, blocks: list[str]) -> None:
    answer = found(ranks, "recompute_after", tp=tp, blocks=blocks)[0]
    assert answer["forward_error"] <= 1e-10
    assert answer["gradient_error"] <= 1e-9


@both
def test_k42_recomputed_with_dropout(ranks: RankPool, tp: int) -> None:
    answer = found(ranks, "recompute_dropout", tp=tp)[0]
    assert answer["again"] == 0.0
    assert answer["plain"] <= 1e-12


def test_without_sharding_the_check_would_fail(ranks: RankPool) -> None:
    """The recipe is right and so is the comparison; only SPLIT is missing."""
    answer = result(ranks, "pair", 2, options={"rules": {"*": "replicate"}})
    is_equal(answer)
    assert answer["held"] == 1.0
