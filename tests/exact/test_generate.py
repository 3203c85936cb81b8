"""Generation with sharded models: the tokens of the unsharded ones, caches of local heads, equal draws."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankPool
from tests.models.generating import GENERATING

pytestmark = pytest.mark.slow
SECONDS = 300.0


def answers(ranks: RankPool, task: str, name: str, tp: int = 2, **payload: Any) -> list[Any]:
    """What the ranks of the mesh answer."""
    payload = {"name": name, "tp": tp, **payload}
    return ranks.run(f"tests.exact.generate_tasks:{task}", payload, timeout=SECONDS)[:tp]


def is_exact(found: dict[str, Any]) -> None:
    """Equal tokens, and logits equal up to rounding."""
    assert found["status"] == "exact", found


@pytest.mark.parametrize("name", GENERATING)
def test_greedy_search_gives_the_same_tokens(ranks: RankPool, name: str) -> None:
    found = answers(ranks, "greedily", name)[0]
    assert found["promoted"], "rounding may hide wrong values"
    is_exact(found["dynamic"])
    assert found["dynamic"]["different_tokens"] > 4, "nothing but one token over and over proves little"
    if found["static"]["status"] != "unsupported":
        is_exact(found["static"])
    assert found["cut_share"] > 0.9


@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.long)])
def test_with_tokens_cut_the_tokens_are_the_same(ranks: RankPool, name: str) -> None:
    """A prompt is cut along its tokens; a step has one token, and runs with whole tensors between the layers."""
    found = answers(ranks, "greedily", name, options={"sequence_parallel": True})[0]
    is_exact(found["dynamic"])
    is_exact(found["static"])
    assert found["cut_share"] > 0.9


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_caches_are_made_of_local_heads(ranks: RankPool, name: str) -> None:
    for shares in answers(ranks, "cache_share", name):
        assert shares == [0.5, 0.5]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_sampling_with_seeds_of_their_own_gives_all_ranks_what_rank_0_draws_unsharded(
    ranks: RankPool, name: str
) -> None:
    found = answers(ranks, "sampled", name)
    assert found[0]["tokens"][0] != found[0]["tokens"][1], "every call drew the same"
    for rank in found:
        assert rank["tokens"] == rank["again"]
        assert rank["untouched"] == rank["at_first"], "greedy search drew from the user's generator"
    assert found[0]["after"] == found[0]["unsharded_after"]
    assert found[0]["after"] != found[1]["after"]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beam_search(ranks: RankPool, name: str) -> None:
    found = answers(ranks, "searched", name, options={"num_beams": 3})
    for rank in found:
        for one in rank["found"]:
            is_exact(one)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_padded_batch_takes_another_path(ranks: RankPool, name: str) -> None:
    for rank in answers(ranks, "searched", name, options={}, padded=True):
        for one in rank["found"]:
            is_exact(one)


def test_tokens_looked_up_in_the_prompt_are_checked_some_at_once(ranks: RankPool) -> None:
    for rank in answers(ranks, "searched", "llama", options={"prompt_lookup_num_tokens": 3}, one=True):
        for one in rank["found"]:
            is_exact(one)


@pytest.mark.parametrize("cut_helper", [False, True], ids=["whole helper", "sharded helper"])
def test_assisted_generation(ranks: RankPool, cut_helper: bool) -> None:
    for rank in answers(ranks, "assisted", "llama", cut_helper=cut_helper):
        for one in rank["found"]:
            is_exact(one)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_filled_cache_is_gone_on_with(ranks: RankPool, name: str) -> None:
    for rank in answers(ranks, "goes_on", name):
        for one in rank:
            is_exact(one)


def test_methods_that_generate_calls_read_whole_parameters(ranks: RankPool) -> None:
    """Outside of forwards they would be DTensors, which torch does not mix with tensors."""
    for found in answers(ranks, "by_methods", ""):
        assert max(found["errors"]) <= 1e-12, found
        assert found["placed"]["reader.queries"] == (2, 8), "a matrix stays in parts, also after it was read"
        assert found["placed"]["reader.up.weight"] == (8, 8)
