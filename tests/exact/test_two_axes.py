"""Tensor parallelism and FSDP2 together, on four ranks."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ["hf:llama", "hf:gpt2", "hf:phi3", "user:nanogpt"])
@pytest.mark.parametrize("names", [("dp", "tp"), ("dp_shard", "tp")])
def test_a_step_is_that_of_the_whole_batch(ranks: RankPool, model: str, names: tuple[str, str]) -> None:
    for found in ranks.run("tests.harness.two_axes:train_step", {"model": model, "names": names}):
        assert found["kept"], "the weights gathered after sharding are not the original ones"
        assert found["names"]
        assert found["gradient"] <= 1e-12
        assert found["norm"] <= 1e-12
        assert found["step"] <= 1e-9
        assert found["held"] <= 0.3, "four ranks hold about a quarter each"
