"""Modules that once gave wrong numbers: what they do is right now, or refused by name."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.models import hard

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", sorted(hard.EXACT))
def test_exact(ranks: RankPool, name: str, tp: int) -> None:
    found = ranks.run("tests.models.hard:compare", {"name": name, "tp": tp})[0]
    assert "refused" not in found, found
    assert found["forward"] <= 1e-12, found
    assert found["gradient"] <= 1e-12, found
    assert found["cut"] > 0, "nothing was cut, so nothing was tested"


@pytest.mark.parametrize("name", sorted(hard.REFUSED))
def test_refused_by_name(ranks: RankPool, name: str) -> None:
    for found in ranks.run("tests.models.hard:compare", {"name": name, "tp": 4}):
        assert hard.REFUSED[name][1] in found.get("refused", ""), found
