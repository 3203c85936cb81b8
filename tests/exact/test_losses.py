"""Losses over a vocabulary that is cut: exact in float64, and no rank ever has all logits (loss_tasks.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from autotp.ranks import RankPool
from tests.exact.loss_tasks import BASE, GATHERED, LENGTH, LOSSES, ROWS
from tests.harness.params import one_size_each

pytestmark = pytest.mark.slow

TASKS = "tests.exact.loss_tasks:"


@pytest.mark.parametrize(("name", "tp"), one_size_each(LOSSES))
def test_loss(ranks: RankPool, name: str, tp: int) -> None:
    case = LOSSES[name]
    found = ranks.run(TASKS + "measured", {"name": name, "tp": tp})[0]
    assert found["ok"] and found["promoted"], found
    assert found["rows"]["head.weight"][0] == "colwise", found["rows"]
    assert found["planned"] - BASE == Counter(case.sent.split(", ")), found["planned"]
    assert found["ran"] == found["planned"]
    if case.targets != "probabilities":  # which are as large
        assert found["largest"] < ROWS * LENGTH * case.classes, "a rank had all logits"


@pytest.mark.parametrize("loss_only", [False, True], ids=["", "loss only"])
@pytest.mark.parametrize(("name", "tp"), [("llama", 4), ("tied llama", 2), ("gpt2", 2), ("bert", 2), ("t5", 2)])
def test_labels_of_transformers(ranks: RankPool, name: str, tp: int, loss_only: bool) -> None:
    """Logits that are returned beside the loss are gathered for that alone; not returned, they stay cut."""
    found = ranks.run(TASKS + "of_transformers", {"name": name, "tp": tp, "loss only": loss_only})[0]
    assert found["ok"] and found["promoted"], found
    tokens = 2 * 7 * 8  # bytes of a number for each, in float64
    statistics = 3 * tp * tokens
    inner = 32 * tokens  # BERT gathers once before its output layer
    assert [n for n in found["gathers"] if n != inner] == [statistics] + [65 * tokens] * (not loss_only)


@pytest.mark.parametrize("name", GATHERED)
def test_where_a_rank_cannot_do_it_alone_logits_are_gathered(ranks: RankPool, name: str) -> None:
    """Exact all the same, and as before: one all-gather of the logits, with the reason in the plan."""
    found = ranks.run(TASKS + "measured", {"name": name, "tp": 2})[0]
    assert found["ok"] and found["promoted"], found
    assert found["planned"] - BASE == Counter(["all_gather forward"])
    assert "its output is gathered" in found["rows"]["head.weight"][1]


@pytest.mark.parametrize("name", ["mean", "log_softmax and nll_loss", "by hand"])
def test_with_sequence_parallelism(ranks: RankPool, name: str) -> None:
    found = ranks.run(TASKS + "measured", {"name": name, "tp": 2, "tokens": True})[0]
    assert found["ok"] and found["promoted"], found
    assert found["ran"] == found["planned"]
    assert found["largest"] < ROWS * LENGTH * LOSSES[name].classes, "a rank had all logits"


def test_in_bfloat16(ranks: RankPool) -> None:
    """As precise as the unsharded loss, whose own rounding is of this size, and of the same type."""
    names = ["mean", "label smoothing", "z-loss", "log_softmax and nll_loss", "probabilities", "shifted"]
    found = ranks.run(TASKS + "mixed", {"names": names})[0]
    for name, (same, error) in found.items():
        assert same, name
        assert error < 0.05, (name, error)


@pytest.mark.parametrize("name", ["class weights and smoothing", "z-loss", "log-probabilities and entropy"])
def test_compiled(ranks: RankPool, name: str) -> None:
    assert ranks.run(TASKS + "compiled", {"name": name})[0] < 1e-10


@pytest.mark.parametrize("name", ["class weights and smoothing", "by hand", "log-probabilities and entropy"])
def test_differentiated_twice(ranks: RankPool, name: str) -> None:
    assert ranks.run(TASKS + "twice", {"name": name})[0] < 1e-9
