"""Experts on different ranks (style `expertwise`) in models of transformers: six experts on two and four ranks."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.models.experts import RULES

pytestmark = pytest.mark.slow

SHORT = {"gpt_oss/grouped_mm": 4}
LONG = {"mixtral/grouped_mm": 4, "qwen3/grouped_mm": 4, "olmoe/grouped_mm": 2, "deepseek/grouped_mm": 4,
        "mixtral/eager": 4, "gpt_oss/eager": 2, "deepseek/eager": 4, "llama4/eager": 4, "gpt_oss/batched_mm": 4,
        "qwen3/batched_mm": 2, "mixtral/grouped_mm/one": 4, "gpt_oss/eager/one": 4,
        "gpt_oss/batched_mm/one": 2}  # fmt: skip


def _parameters() -> list[object]:
    short = [pytest.param(name, tp, id=f"{name}-tp{tp}") for name, tp in SHORT.items()]
    return short + [pytest.param(name, tp, id=f"{name}-tp{tp}", marks=pytest.mark.long) for name, tp in LONG.items()]


@pytest.mark.parametrize(("name", "tp"), _parameters())
def test_experts_on_different_ranks_are_exact(ranks: RankPool, name: str, tp: int) -> None:
    payload = {"name": name, "tp": tp, "builder": "tests.models.experts:build", "options": {"rules": RULES}}
    figures = ranks.run("tests.harness.tasks:measure_model", payload)[0]
    assert figures["promoted"]
    assert figures["ok"], figures


@pytest.mark.long
def test_with_tokens_cut_between_layers(ranks: RankPool) -> None:
    options = {"rules": RULES, "sequence_parallel": True}
    payload = {"name": "qwen3/grouped_mm", "tp": 2, "builder": "tests.models.experts:build", "options": options}
    assert ranks.run("tests.harness.tasks:measure_model", payload)[0]["ok"]
