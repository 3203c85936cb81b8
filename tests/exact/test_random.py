"""What a sharded model draws outside of cut regions: as unsharded; apart in groups that lie beside each other."""

from __future__ import annotations

import pytest
import torch

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow
TASK = "tests.exact.random_tasks:forwards"


@pytest.mark.parametrize("apart", [0, 1])
def test_draws_are_those_of_the_unsharded_model(ranks: RankPool, apart: int) -> None:
    found = ranks.run(TASK, {"grid": None, "apart": apart})[:2]
    for rank in found:
        assert torch.allclose(torch.tensor(rank["found"]), torch.tensor(rank["wanted"]), rtol=0, atol=1e-13)
        assert rank["found"][0] != rank["found"][1]
    assert found[0]["after"] == found[0]["wanted_after"]
    assert (found[1]["after"] == found[1]["wanted_after"]) == (not apart)


@pytest.mark.parametrize("apart", [0, 1])
def test_noise_in_a_cut_region_is_that_of_the_unsharded_model(ranks: RankPool, apart: int) -> None:
    found = ranks.run(TASK, {"grid": None, "apart": apart, "inside": True})[:2]
    for rank in found:
        assert torch.allclose(torch.tensor(rank["found"]), torch.tensor(rank["wanted"]), rtol=0, atol=1e-13)
        assert rank["cut"] == 6
    assert found[0]["after"] == found[0]["wanted_after"]


@pytest.mark.parametrize("apart", [0, 1])
def test_groups_beside_each_other_draw_apart(ranks: RankPool, apart: int) -> None:
    found = ranks.run(TASK, {"grid": (2, 2), "apart": apart})
    outs = [rank["found"] for rank in found]
    assert outs[0] == outs[1] and outs[2] == outs[3]
    assert outs[0] != outs[2]
    assert outs[0][0] != outs[0][1]
    if not apart:
        assert all(rank["after"] == found[0]["after"] for rank in found)
