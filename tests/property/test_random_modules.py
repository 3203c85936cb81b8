"""Random modules: sharded they equal themselves unsharded, forward and backward, or ``shard`` refuses them.

Fifty by default; AUTOTP_PROPERTY_EXAMPLES=2000 for a long search (then not the same ones each time).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotp.ranks import RankPool
from tests.property.pieces import ONE, TWO
from tests.property.programs import Line

pytestmark = pytest.mark.slow

DEFAULT = 50
EXAMPLES = int(os.environ.get("AUTOTP_PROPERTY_EXAMPLES", DEFAULT))
SECONDS = 300.0
FORWARD, GRADIENTS = 1e-10, 1e-9
MOSTLY = 0.9  # of the modules have that share of their weight matrices cut
VARIANTS = 45  # every layout of attention with every extra

lines = st.builds(
    Line,
    piece=st.sampled_from([*ONE, *TWO]),
    variant=st.integers(0, VARIANTS - 1),
    x=st.integers(1, 3),
    y=st.integers(1, 3),
    share=st.booleans(),
)
programs = st.lists(lines, min_size=1, max_size=6).map(tuple)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks for all examples."""
    with RankPool(2, timeout=SECONDS, imports=("autotp.sharding",)) as pool:
        yield pool


def test_random_modules_are_exact_or_refused(pair: RankPool) -> None:
    found: Counter[str] = Counter()

    @given(program=programs, train=st.booleans())
    @settings(
        max_examples=EXAMPLES,
        derandomize=EXAMPLES == DEFAULT,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def exact_or_refused(program: tuple[Line, ...], train: bool) -> None:
        figures = pair.run("tests.property.tasks:check", {"lines": program, "train": train, "tp": 2})[0]
        found[kind(figures)] += 1
        if "refused" in figures:
            return
        assert figures["promoted"], f"not in float64 all the way: {figures['obstacle']}"
        assert not figures["problems"], figures["problems"]
        assert figures["forward_error"] <= FORWARD, figures
        assert figures["gradient_error"] <= GRADIENTS, figures
        assert figures["spread"] <= GRADIENTS, figures
        assert figures["optimizer_error"] <= GRADIENTS, figures

    exact_or_refused()
    print(dict(found))
    assert found["cut"] >= MOSTLY * found.total(), found


def kind(figures: dict[str, Any]) -> str:
    """Refused, cut (most bytes of its matrices are), or whole."""
    return "refused" if "refused" in figures else "cut" if figures["cut_share"] >= MOSTLY else "whole"
