"""Other libraries around sharded models. Each is skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks that are all there are."""
    with RankPool(2, timeout=SECONDS, imports=("autotp.sharding",)) as pool:
        yield pool


def is_trained(found: dict[str, Any], held: float) -> None:
    """The parameters of the unsharded model after the same steps."""
    assert "refused" not in found, found["refused"]
    assert found["trained"] <= 1e-10, found
    assert found["held"] <= held, "nothing was cut, so nothing was tested"


def test_shard_is_the_parallelize_fn_of_lightning(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")  # whose state is put back as it was
    found = ranks.run("tests.exact.libraries_tasks:fabric", str(tmp_path / "checkpoint"), timeout=SECONDS)
    for rank in found:
        is_trained(rank, 0.3)
        assert rank["norm"] <= 1e-10
        assert rank["loaded"] <= 1e-10


def test_trainer_of_lightning(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    for rank in ranks.run("tests.exact.libraries_tasks:lightning_trainer", str(tmp_path), timeout=SECONDS):
        is_trained(rank, 0.3)
        assert (rank["steps"], rank["apart"]) == (4, 4), "four steps, of batches that differ between the data ranks"


@pytest.mark.parametrize("launched", ["", "told"], ids=["processes of their own", "by torchrun"])
def test_trainer_of_transformers(two: RankPool, tmp_path: Path, launched: str) -> None:
    pytest.importorskip("accelerate")
    found = run(two, "trainer", folder=str(tmp_path), launched=launched)
    is_trained(found, 0.55)
    for expected, line in zip(*found["logs"], strict=True):
        assert line == pytest.approx(expected, rel=1e-9)


def test_trainer_that_is_not_told_is_refused_by_accelerate(two: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    said = run(two, "trainer", folder=str(tmp_path), launched="untold")["refused"]
    assert "DTensor` parameters, which is incompatible with DDP" in said


def test_a_loop_of_accelerate(two: RankPool) -> None:
    pytest.importorskip("accelerate")
    found = two.run("tests.exact.libraries_tasks:accelerated", timeout=SECONDS)
    assert found[0]["seen"] == found[1]["seen"]
    assert len(found[0]["seen"]) == 4
    for rank in found:
        is_trained(rank, 0.55)
