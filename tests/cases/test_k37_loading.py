"""K37: each rank reads its part of the files."""

from __future__ import annotations

import pytest

from autotp.ranks import RankPool
from tests.cases.checks import SECONDS, is_named

pytestmark = pytest.mark.slow
ROOM = 32  # MiB for everything else


def test_k37_values_and_memory(ranks: RankPool) -> None:
    for answer in ranks.run("tests.cases.tasks_meta:loaded", {}, timeout=SECONDS):
        assert answer["wrong"] == []
        assert answer["local"] <= 17
        assert answer["peak"] <= answer["local"] + answer["largest"] + ROOM
        assert answer["plain"] >= 64, "the measurement does not see what is read"


@pytest.mark.parametrize(
    ("key", "value", "options", "words"),
    [
        ("layers.1.weight", None, {}, ["layers.1.weight", "model.safetensors"]),
        ("layers.7.weight", (16, 16), {}, ["layers.7.weight", "model.safetensors"]),
        ("layers.1.weight", (16, 8), {}, ["layers.1.weight", "model.safetensors", "[16, 8]", "[16, 16]"]),
        ("layers.1.weight", None, {"allow_missing": ["layers.1.*"]}, ["loaded; on meta: layers.1.weight"]),
        ("layers.7.weight", (16, 16), {"allow_unexpected": True}, ["loaded; on meta: nothing"]),
    ],
)
def test_k37_keys(
    ranks: RankPool, key: str, value: tuple[int, int] | None, options: dict[str, object], words: list[str]
) -> None:
    payload = {"key": key, "value": value, "options": options}
    for answer in ranks.run("tests.cases.tasks_meta:misfit", payload, timeout=SECONDS)[:2]:
        is_named(answer, *words)
