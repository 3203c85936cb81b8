"""Parameters of tests, and which of them the short run leaves out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def one_size_each(names: Iterable[str]) -> list[object]:
    """Every name on 2 and on 4 ranks; in the short run, by turns, on one of them."""
    return [
        pytest.param(name, tp, marks=[pytest.mark.long] * (i % 2 != tp // 4))
        for i, name in enumerate(names)
        for tp in (2, 4)
    ]
