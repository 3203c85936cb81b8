"""Losses over a vocabulary that is cut: exact in float64, and no rank ever has all logits (loss_tasks.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from autotp.ranks import RankPool
from tests.exact.loss_tasks import BASE, LENGTH, LOSSES, ROWS

pytestmark = pytest.mark.slow

TASKS = "tests.exact.loss_tasks:"


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
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
    statistics = 3 * tp * 2 * 7 * 4
    inner = 2 * 7 * 32 * 4  # BERT gathers once before its output layer
    assert [n for n in found["gathers"] if n != inner] == [statistics] + [2 * 7 * 65 * 4] * (not loss_only)
