"""Tensor parallelism and FSDP2 together, on four ranks."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ["hf:llama", "hf:gpt2", "hf:phi3", "user:nanogpt", "user:recurrent"])
@pytest.mark.parametrize("names", [("dp", "tp"), ("dp_shard", "tp")])
def test_a_step_is_that_of_the_whole_batch(ranks: RankPool, model: str, names: tuple[str, str]) -> None:
    for found in ranks.run("tests.harness.two_axes:train_step", {"model": model, "names": names}):
        assert found["kept"], "the weights gathered after sharding are not the original ones"
        assert found["names"]
        assert found["gradient"] <= 1e-12
        assert found["norm"] <= 1e-12
        assert found["step"] <= 1e-9
        assert found["held"] <= 0.3, "four ranks hold about a quarter each"


def test_options_of_fully_shard_are_handed_on(ranks: RankPool) -> None:
    for found in ranks.run("tests.harness.two_axes:with_policies"):
        assert found["dtype"] == "torch.bfloat16"
        assert found["error"] <= 0.03, "rounding of bfloat16"
        assert found["gradients"] == {"torch.float32"}
        assert found["wrapped"] == 3, "two layers and the root"
        assert "mp_policy" in found["refused"], "an unknown option is refused with the known ones"


def test_three_axes() -> None:
    payload = {"model": "hf:llama", "names": ("dp_replicate", "dp_shard", "tp")}
    with RankPool(8, timeout=300) as eight:
        for found in eight.run("tests.harness.two_axes:train_step", payload):
            assert found["kept"]
            assert found["names"]
            assert max(found["gradient"], found["norm"]) <= 1e-12
            assert found["step"] <= 1e-9
            assert found["held"] <= 0.3, "dp_shard and tp share, dp_replicate copies"
