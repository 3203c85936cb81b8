"""Other libraries around sharded models. Each is skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autotp
from autotp.errors import PlanError
from autotp.ranks import RankPool

pytestmark = pytest.mark.slow
SECONDS = 300.0


def run(ranks: RankPool, task: str, **payload: Any) -> dict[str, Any]:
    """What rank 0 finds."""
    found: dict[str, Any] = ranks.run(f"tests.exact.libraries_tasks:{task}", payload, timeout=SECONDS)[0]
    return found


def test_adapters_of_peft_before_sharding(ranks: RankPool) -> None:
    pytest.importorskip("peft")
    found = run(ranks, "adapters", before=True)
    assert "refused" not in found, found["refused"]
    assert found["forward"] <= 1e-12, found
    assert found["gradient"] <= 1e-12, found
    assert found["same_gradients"]
    assert found["names"]
    assert found["held"] <= 0.6


def test_adapters_of_peft_after_sharding_are_refused_by_name(ranks: RankPool) -> None:
    pytest.importorskip("peft")
    said = run(ranks, "adapters", before=False)["refused"]
    assert "lora_A" in said
    assert "before autotp.shard" in said


@pytest.mark.parametrize(
    ("config", "kind"), [("Int8WeightOnlyConfig", "Int8Tensor"), ("Float8WeightOnlyConfig", "Float8Tensor")]
)
def test_weights_that_torchao_has_quantised_are_refused_by_name(config: str, kind: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    quantization.quantize_(model, getattr(quantization, config)())
    with pytest.raises(PlanError, match=rf"0\.weight \[64, 32\] is a {kind}.*quantised"):
        autotp.plan(model, tp=2, sample=torch.randn(4, 32))
