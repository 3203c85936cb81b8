"""What people put around a model works on a sharded one as on an unsharded one, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow
SECONDS = 300.0


def run(ranks: RankPool, task: str, **payload: Any) -> dict[str, Any]:
    """What rank 0 finds."""
    found: dict[str, Any] = ranks.run(f"tests.exact.around_tasks:{task}", payload, timeout=SECONDS)[0]
    return found


def is_exact(found: dict[str, Any]) -> None:
    """Forward, gradients, which parameters have one, names; and something was cut."""
    assert "refused" not in found, found["refused"]
    assert found["forward"] <= 1e-12, found
    assert found["gradient"] <= 1e-12, found
    assert found["same_gradients"]
    assert found["names"]
    assert found["held"] <= 0.6, "nothing was cut, so nothing was tested"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("stack", "freeze", ""),
        ("stack", "", "freeze"),
        ("stack", "selective", ""),
        ("stack", "", "selective"),
        ("hf:llama", "gradient_checkpointing", ""),
        ("hf:llama", "", "gradient_checkpointing"),
        ("hf:gpt2", "", "gradient_checkpointing"),
        ("adapted", "", ""),
        ("headed", "", "adapt head"),
    ],
)
def test_changed(ranks: RankPool, name: str, before: str, after: str) -> None:
    is_exact(run(ranks, "changed", name=name, before=before, after=after))


@pytest.mark.parametrize("name", ["hf:llama", "stack"])
def test_inference_mode(ranks: RankPool, name: str) -> None:
    """What is sharded in it is right in it, and can be trained outside of it."""
    found = run(ranks, "served", name=name)
    assert found["apart"] <= 1e-12
    is_exact({**found, "names": True})


@pytest.mark.parametrize("where", ["up", "down"])
def test_adapters_after_sharding_are_refused_inside_of_cut_regions(ranks: RankPool, where: str) -> None:
    said = run(ranks, "changed", name="mlp", after=f"adapt {where}")["refused"]
    assert f"{where}.a.weight" in said
    assert "Add adapters before autotp.shard" in said


def test_an_adapter_that_fits_but_reads_an_entered_tensor_is_refused(ranks: RankPool) -> None:
    """Its output has the right shape, and the gradient of its input would count twice."""
    assert "v.a.weight [4, 16]" in run(ranks, "changed", name="gathered", after="adapt v")["refused"]


def test_a_checkpoint_of_a_modules_own_edited_code_is_refused(ranks: RankPool) -> None:
    said = run(ranks, "changed", name="in_module")["refused"]
    assert "matmul at around_models.py" in said
    assert "checkpoint whole modules" in said


def test_gradients_add_up(ranks: RankPool) -> None:
    assert run(ranks, "accumulate", name="stack")["gradient"] <= 1e-12


@pytest.mark.parametrize("name", ["stack", "hf:phi3"])
def test_copies_and_moving_averages(ranks: RankPool, name: str) -> None:
    found = run(ranks, "copies", name=name)
    assert found["copy"] <= 1e-12
    assert found["apart"] <= 1e-12, "changing a copy changed the model"
    assert found["average"] <= 1e-10


@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("name", ["stack", "hf:llama"])
def test_bfloat16_is_as_far_from_float64_as_without_sharding(ranks: RankPool, name: str, how: str) -> None:
    found = run(ranks, "precision", name=name, how=how)
    assert found["same_types"]
    for unsharded, sharded in (found["forward"], found["gradient"]):
        assert unsharded > 1e-4, "this did not run in bfloat16"
        assert sharded <= 2 * unsharded


@pytest.mark.parametrize("name", ["stack", "hf:phi3"])
def test_pickling_is_refused_and_the_state_dict_goes_through_a_file(ranks: RankPool, name: str) -> None:
    found = run(ranks, "pickled", name=name)
    assert len(found["said"]) == 2
    assert all("save model.state_dict()" in said for said in found["said"])
    assert found["error"] == 0


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("user:titan_llama", False),
        pytest.param("user:titan_llama", True, marks=pytest.mark.long),
        pytest.param("user:nanogpt", True, marks=pytest.mark.long),
    ],
)
def test_a_loop_as_torchtitan_has_it(ranks: RankPool, tmp_path: Path, name: str, draws: bool) -> None:
    """Meta, parallelised, materialised, AdamW, warm-up, clipping, accumulation, DCP."""
    payload = {"name": name, "draws": draws, "folder": str(tmp_path / "checkpoint")}
    for found in ranks.run("tests.exact.loops_tasks:titan", payload, timeout=SECONDS):
        assert "refused" not in found, found["refused"]
        assert max(found["losses"], found["norms"], found["trained"], found["resumed"]) <= 1e-9, found
        assert found["held"] <= 0.3
        for parameter, (errors, std, different) in found["start"].items():
            assert errors < 5 and std > 0.01, parameter
            assert different > 0.95, parameter


@pytest.mark.parametrize("name", ["stack", "hf:llama"])
def test_distributed_data_parallel_around_a_sharded_model_is_refused(ranks: RankPool, name: str) -> None:
    found = ranks.run("tests.exact.loops_tasks:ddp", {"name": name}, timeout=SECONDS)[0]
    assert "DistributedDataParallel does not go around a sharded model" in found["refused"]
    assert "axis dp beside tp" in found["refused"]
    assert found["error"] <= 1e-12, "the refusal changed the model"
