"""K11, K13, K18, K20, K22, K24: buffers, reductions, counts and shapes along the dim that is cut."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.cases import checks
from tests.cases.checks import equal, equal_or_named

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("tp", [2, 4])]


@pytest.mark.parametrize("recipe", ["K11 buffer", "K11 list"])
def test_k11_slopes_of_the_global_head(ranks: RankPool, tp: int, recipe: str) -> None:
    equal(ranks, recipe, tp)


def test_k11_slopes_computed_from_the_number_of_heads(ranks: RankPool, tp: int) -> None:
    equal_or_named(ranks, "K11 computed", tp, 4, tp)


@pytest.mark.parametrize("kind", ["layer_norm", "module", "mean", "softmax", "normalize", "flip", "permute", "view"])
def test_k13_reduction_over_the_cut_features(ranks: RankPool, tp: int, kind: str) -> None:
    equal_or_named(ranks, f"K13 {kind}", tp, tp)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_k18_fewer_kv_heads_than_ranks(ranks: RankPool, tp: int, kv_heads: int) -> None:
    found = checks.result(ranks, f"K18 {kv_heads}", tp, held=["q.weight", "o.weight"])
    if "refused" in found:
        checks.is_named(found["refused"], 8, kv_heads, tp)
        return
    checks.is_equal(found)
    assert found["held"] <= checks.SHARE[tp]


def test_k18_k_and_v_kept_whole_by_a_rule(ranks: RankPool, tp: int) -> None:
    """q is cut and kv is not: the repeat count, read from both, would pair heads wrongly."""
    rules = {"k.weight": "replicate", "v.weight": "replicate"}
    equal_or_named(ranks, "K18 2", tp, tp, options={"rules": rules})


def test_k18_the_norm_counts_a_kv_head_once(ranks: RankPool, tp: int) -> None:
    payload = {"recipe": "K18 2", "tp": tp}
    found = ranks.run("tests.cases.tasks_training:train", payload, timeout=checks.SECONDS)[0]
    assert found["norm_error"] <= 1e-10
    assert found["parameter_error"] <= 1e-9


def test_k20_heads_fixed_in_the_code(ranks: RankPool, tp: int) -> None:
    equal_or_named(ranks, "K20", tp, 4, tp)


def test_k22_block_of_37_features(ranks: RankPool, tp: int) -> None:
    equal_or_named(ranks, "K22", tp, "blocks.1", 37, tp)


@pytest.mark.parametrize("recipe", ["K24", "K24 large"])
def test_k24_odd_vocabulary(ranks: RankPool, tp: int, recipe: str) -> None:
    found = equal(ranks, recipe, tp)
    assert found["forward_error"] <= 1e-10
