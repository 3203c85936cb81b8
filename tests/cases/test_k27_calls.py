"""K17, K27, K45, K48: how modules are called, torch's own blocks, convolutions, recurrence, two towers."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.cases import checks
from tests.cases.checks import equal, equal_and_split

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("tp", [2, 4])]

FLOAT32 = {"promote": False, "dropout": True, "backward": False}


@pytest.mark.parametrize("recipe", ["K17", "K17 no bias", "K17 dims", "K17 layer"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_k17_attention_of_torch(ranks: RankPool, tp: int, recipe: str, train: bool) -> None:
    equal(ranks, recipe, tp, train=train)


@pytest.mark.parametrize("recipe", ["K17", "K17 layer"])
def test_k17_fast_path(ranks: RankPool, tp: int, recipe: str) -> None:
    """Without gradients and without any mode torch takes another way, in one fused operation."""
    import torch

    equal(ranks, recipe, tp, settings={**FLOAT32, "dtype": torch.float32})


def test_k27_keywords_tuples_dicts_dataclasses(ranks: RankPool, tp: int) -> None:
    equal_and_split(ranks, "K27", tp)


@pytest.mark.parametrize("recipe", ["K45 conv", "K45 LSTM", "K45 GRU"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_k45_convolution_and_recurrence(ranks: RankPool, tp: int, recipe: str, train: bool) -> None:
    equal(ranks, recipe, tp, train=train)


def test_k48_three_vision_heads_beside_a_language_model(ranks: RankPool, tp: int) -> None:
    parts = ["lm_head.weight", "text.model.embed.weight", "text.*.mlp.*", "text.*.attention.[qo].weight"]
    equal_and_split(ranks, "K48", tp, parts)


def test_k48_a_rule_for_layers_does_not_hit_both_towers_unnoticed(ranks: RankPool, tp: int) -> None:
    payload = {"recipe": "K48", "tp": tp, "rules": {"layers.*": "replicate"}}
    found = ranks.run("tests.cases.tasks_mesh:plan_with_rules", payload, timeout=checks.SECONDS)[0]
    if "refused" in found:
        checks.is_named(found["refused"], "layers.*")
        return
    towers = {name.split(".")[0] for name in found["changed"]}
    assert len(towers) <= 1 or any("layers.*" in text for text in found["findings"]), found
