"""K01-K06: whole parameters inside a cut region, whose gradient each rank has only in part."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import equal_and_split

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("tp", [2, 4])]


def test_k01_norms_of_q_and_k(ranks: RankPool, tp: int) -> None:
    equal_and_split(ranks, "K01", tp)


def test_k03a_scalar_in_the_region(ranks: RankPool, tp: int) -> None:
    equal_and_split(ranks, "K03a", tp)


def test_k03b_temperature_and_sink_per_head(ranks: RankPool, tp: int) -> None:
    equal_and_split(ranks, "K03b", tp)


@pytest.mark.parametrize("recipe", ["K05", "K05 norm"])
def test_k05_shared_rotary_key_of_latent_attention(ranks: RankPool, tp: int, recipe: str) -> None:
    equal_and_split(ranks, recipe, tp, ["q.weight", "kv_b.weight", "o.weight"])


@pytest.mark.parametrize("recipe", ["K06", "K06 after", "K06 top-2", "K06 packed"])
def test_k06_router_weight_in_the_experts(ranks: RankPool, tp: int, recipe: str) -> None:
    equal_and_split(ranks, recipe, tp, ["up.*", "down*", "gate_up"])
