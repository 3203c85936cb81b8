"""EQ, SPLIT and NAMED.

EQ      forward, all gradients, state, sharing and one optimizer step equal the unsharded model's in float64, on all
        ranks: outputs to 1e-10 of the largest, gradients to 1e-9 of the largest gradient of the model.
SPLIT   each rank holds at most 0.6 (tp=2) or 0.4 (tp=4) of the bytes of the weight matrices.
NAMED   all ranks raise an AutotpError before any collective; it has the place, the numbers and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autotp.ranks import RankPool

SECONDS = 60.0
SHARE = {2: 0.6, 4: 0.4}


def result(ranks: RankPool, recipe: str, tp: int, **payload: Any) -> dict[str, Any]:
    """What rank 0 finds."""
    payload = {"recipe": recipe, "tp": tp, **payload}
    found: dict[str, Any] = ranks.run("tests.cases.tasks:compare", payload, timeout=SECONDS)[0]
    return found


def is_equal(found: dict[str, Any]) -> None:
    """EQ."""
    assert "refused" not in found, f"refused: {found['refused']}"
    assert found["ok"], "\n".join(
        [
            f"forward {found['forward_error']:.1e}, gradients {found['gradient_error']:.1e}, "
            f"step {found['optimizer_error']:.1e}, spread {found['spread']:.1e}",
            found["first_bad"],
            *found["problems"],
            *found["wrong_gradients"],
        ]
    )


def is_named(text: str, *words: str | int) -> None:
    """NAMED: the text has all of these, the numbers as numbers of their own."""
    for word in words:
        pattern = rf"(?<![\d.]){word}(?![\d.]*\d)" if isinstance(word, int) else re.escape(word)
        assert re.search(pattern, text), f"{word!r} is not in the error: {text}"


def equal(ranks: RankPool, recipe: str, tp: int, **payload: Any) -> dict[str, Any]:
    """EQ; a parameter that is left whole must have its reason in the plan."""
    found = result(ranks, recipe, tp, **payload)
    is_equal(found)
    explained(ranks, recipe, tp, found["whole"])
    return found


def equal_and_split(ranks: RankPool, recipe: str, tp: int, parts: Sequence[str] = (), **payload: Any) -> dict[str, Any]:
    """EQ and SPLIT, the latter of the parameters that match `parts`, or of all matrices."""
    found = equal(ranks, recipe, tp, held=list(parts), **payload)
    assert found["held"] <= SHARE[tp], f"each rank holds {found['held']:.0%}; whole: {', '.join(found['whole'])}"
    return found


def equal_or_named(ranks: RankPool, recipe: str, tp: int, *words: str | int, **payload: Any) -> None:
    """EQ, or NAMED with these words."""
    found = result(ranks, recipe, tp, **payload)
    if "refused" in found:
        is_named(found["refused"], *words)
    else:
        is_equal(found)
        explained(ranks, recipe, tp, found["whole"])


def explained(ranks: RankPool, recipe: str, tp: int, names: Sequence[str]) -> None:
    """The plan gives a reason for each of these."""
    if names:
        reasons = ranks.run("tests.cases.tasks:reasons", {"recipe": recipe, "tp": tp}, timeout=SECONDS)[0]
        silent = [name for name in names if not reasons.get(name)]
        assert not silent, f"left whole without a reason: {', '.join(silent)}"
