"""Another path through a module's code than the planned one: refused by name where its numbers would be wrong."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.models import paths

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(paths.CASES))
def test_refused_by_name(ranks: RankPool, name: str) -> None:
    for found in ranks.run("tests.models.paths:run", {"name": name, "tp": 2})[:2]:
        assert found["before"] <= 1e-12, found
        assert found["cut"], found
        text = found.get("refused", "")
        assert "the call of softmax at paths.py:" in text, found
        assert "was not reached when the plan was made" in text, found


@pytest.mark.parametrize("name", sorted(paths.HARMLESS))
def test_what_changes_no_path_is_exact(ranks: RankPool, name: str) -> None:
    for found in ranks.run("tests.models.paths:run", {"name": name, "tp": 2})[:2]:
        assert max(found["before"], found["after"]) <= 1e-12, found
        assert found["cut"], found


def test_layers_kept_whole_take_every_path(ranks: RankPool) -> None:
    options = {"rules": {"up": "replicate"}}
    for found in ranks.run("tests.models.paths:run", {"name": "a computed value", "tp": 2, "options": options})[:2]:
        assert max(found["before"], found["after"]) <= 1e-12, found


def test_a_sample_decides_where_a_computed_value_does(ranks: RankPool) -> None:
    payload = {"name": "a computed value", "tp": 2, "offset": 1000}
    for found in ranks.run("tests.models.paths:run", payload)[:2]:
        assert max(found["before"], found["after"]) <= 1e-12, found
        assert found["cut"], found


@pytest.mark.parametrize("name", sorted(paths.BY_SAMPLE))
def test_what_a_model_computes_and_reads_is_that_of_the_sample(ranks: RankPool, name: str) -> None:
    for found in ranks.run("tests.models.paths:run", {"name": name, "tp": 2})[:2]:
        assert max(found["before"], found["after"]) <= 1e-12, found
        assert found["cut"], found
