"""`autotp demo`: what it shows, and that its verdict can fail."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotp import demo
from autotp.errors import AutotpError
from autotp.ranks import RankPool


def good() -> demo.Training:
    return demo.Training(
        steps=[demo.Step(loss=1.0, sharded_loss=1.0, gradients=1e-14)], weights=1e-12, held=5, whole=10
    )


class Ranks:
    """Stands in for the pool of processes: both ranks answer the same."""

    def __init__(self, answer: demo.Training | Exception) -> None:
        self.answer = answer

    def __call__(self, size: int, timeout: float, imports: Sequence[str] = ()) -> Ranks:
        return self

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, task: str, payload: object) -> list[demo.Training]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * 2


def shown(monkeypatch, answer):
    monkeypatch.setattr(demo, "RankPool", Ranks(answer))
    out, progress = io.StringIO(), io.StringIO()
    code = demo.run(out=out, progress=progress)
    return code, out.getvalue(), progress.getvalue()


def test_both_plans_and_a_summary_are_the_answer_and_progress_is_apart(monkeypatch):
    code, out, progress = shown(monkeypatch, good())
    assert code == 0
    assert out.index("Plan for LanguageModel") < out.index("Plan for ConvNet") < out.index("Summary")
    assert out.count("  ok    ") == 2 and "FAIL" not in out
    assert "planning a language model" in progress and "planning" not in out


STEP = good().steps[0]
WRONG = {
    "loss differs by 1.0e-09": {"steps": [replace(STEP, sharded_loss=1.0 + 1e-9)]},
    "a gradient differs by 1.0e-03": {"steps": [STEP, replace(STEP, gradients=1e-3)]},
    "a gradient differs by nan": {"steps": [replace(STEP, gradients=float("nan"))]},
    "loss differs by nan": {"steps": [STEP, replace(STEP, sharded_loss=float("nan"))]},
    "a weight after training differs by 1.0e-01": {"weights": 0.1},
    "holds no less than the unsharded model": {"held": 10},
}


@pytest.mark.parametrize("told", WRONG)
def test_whatever_is_wrong_is_told_and_the_code_is_1(monkeypatch, told):
    code, out, _ = shown(monkeypatch, replace(good(), **WRONG[told]))
    assert code == 1 and "FAIL" in out and told in out and "fault of autotp" in out


def test_ranks_that_fail_are_told_and_the_code_is_1(monkeypatch):
    code, out, _ = shown(monkeypatch, AutotpError("rank 1 of 2: it died"))
    assert code == 1 and "could not be trained on 2 ranks: rank 1 of 2: it died" in out


@pytest.mark.slow
def test_real_ranks_train_like_the_unsharded_models(ranks: RankPool):
    for number in range(len(demo.EXAMPLES)):
        for seen in ranks.run("autotp.demo:train", number):
            assert seen.problems() == []
            assert len(seen.steps) == demo.STEPS and seen.steps[-1].loss < seen.steps[0].loss


def test_a_wrong_gradient_shows():
    a, b = demo.EXAMPLES[0].model(), demo.EXAMPLES[0].model()
    for model in (a, b):
        model(demo.EXAMPLES[0].batch()[0]).sum().backward()
    assert demo._gradient_gap(a, b) == 0
    b.head.weight.grad[3, 4] *= 1.001
    assert demo._gradient_gap(a, b) > demo.GRADIENT_LIMIT
