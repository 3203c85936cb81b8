"""Tensor parallelism and FSDP2 together, on four ranks; with copies of them, and pipelines of them, on eight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow


def is_that_of_the_whole_batch(found: dict[str, Any]) -> None:
    """Weights, gradients, and the norm and the step of each way to clip and to step."""
    assert found["kept"], "the weights gathered after sharding are not the original ones"
    assert found["names"]
    assert found["gradient"] <= 1e-12
    assert len(found["norms"]) == len(found["steps"]) == 4
    assert max(found["norms"]) <= 1e-12
    assert max(found["steps"]) <= 1e-9


@pytest.mark.parametrize("model", ["hf:llama", "hf:gpt2", "hf:phi3", "user:nanogpt", "user:recurrent"])
@pytest.mark.parametrize("names", [("dp", "tp"), ("dp_shard", "tp")])
def test_a_step_is_that_of_the_whole_batch(ranks: RankPool, model: str, names: tuple[str, str]) -> None:
    for found in ranks.run("tests.harness.two_axes:train_step", {"model": model, "names": names}):
        is_that_of_the_whole_batch(found)
        assert found["held"] <= 0.3, "four ranks hold about a quarter each"


@pytest.mark.parametrize("fsdp", [{"reshard_after_forward": False}, {"offload": True}], ids=str)
def test_with_options_of_fully_shard_too(ranks: RankPool, fsdp: dict[str, bool]) -> None:
    payload = {"model": "user:titan_llama", "names": ("dp", "tp"), "fsdp": fsdp}
    for found in ranks.run("tests.harness.two_axes:train_step", payload):
        is_that_of_the_whole_batch(found)


def test_options_of_fully_shard_are_handed_on(ranks: RankPool) -> None:
    for found in ranks.run("tests.harness.two_axes:with_policies"):
        assert found["dtype"] == "torch.bfloat16"
        assert found["error"] <= 0.03, "rounding of bfloat16"
        assert found["gradients"] == {"torch.float32"}
        assert found["wrapped"] == 3, "two layers and the root"
        assert "mp_policy" in found["refused"], "an unknown option is refused with the known ones"


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    """Eight ranks for the tests of this file."""
    with RankPool(
        8, timeout=300, imports=("autotp.sharding", "transformers.modeling_utils", "tests.harness.two_axes")
    ) as pool:
        yield pool


def test_three_axes(eight: RankPool) -> None:
    payload = {"model": "user:titan_llama", "names": ("dp_replicate", "dp_shard", "tp")}
    for found in eight.run("tests.harness.two_axes:train_step", payload):
        is_that_of_the_whole_batch(found)
        assert found["held"] <= 0.3, "dp_shard and tp share, dp_replicate copies"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_a_pipeline(eight: RankPool, tmp_path: Path, schedule: str) -> None:
    payload = {"schedule": schedule, "folder": str(tmp_path)}
    for found in eight.run("tests.harness.pipelined:step", payload):
        assert found["names"]
        assert found["gradient"] <= 1e-12
        assert found["loss"] <= 1e-12
        assert found["held"] <= 0.3, "the four ranks of a stage hold about a quarter of it each"
        assert found["resumed"]
