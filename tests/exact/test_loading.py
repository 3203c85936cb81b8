"""Models loaded while they are sharded: bit for bit the original's values, on every rank its part."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow
SECONDS = 240.0


def check(ranks: RankPool, name: str, shape: tuple[int, ...], kind: str, way: str) -> dict[str, Any]:
    """Load and compare."""
    payload = {"name": name, "shape": shape, "kind": kind, "way": way}
    answers = [a for a in ranks.run("tests.exact.loading_tasks:loaded", payload, timeout=SECONDS) if a is not None]
    total = 1
    for size in shape:
        total *= size
    assert len(answers) == total
    for answer in answers:
        assert answer["names"] and answer["shapes"] and answer["ties"]
        assert answer["meta"] == []
        assert answer["wrong"] == []
        assert answer["error"] <= 1e-12
        assert answer["share"] <= 0.8 / (total if len(shape) == 1 else 2) + 0.25
    return answers[0]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["hf:gpt2", "hf:phi3", "hf:llama", "llama tied", "mixtral", "hf:t5", "user:nanogpt"])
def test_models(ranks: RankPool, name: str, tp: int) -> None:
    kind = "pretrained" if name != "user:nanogpt" else "two"
    check(ranks, name, (tp,), kind, "on_meta" if name == "user:nanogpt" else "meta")


@pytest.mark.parametrize("way", ["meta", "on_meta", "sharded", "other values"])
@pytest.mark.parametrize("tp", [2, 4])
def test_uneven_parts(ranks: RankPool, tp: int, way: str) -> None:
    check(ranks, "uneven", (tp,), "one", way)


@pytest.mark.parametrize("kind", ["one", "two", "pickle"])
def test_kinds_of_files(ranks: RankPool, kind: str) -> None:
    check(ranks, "hf:phi3", (2,), kind, "meta")


@pytest.mark.parametrize("way", ["meta", "sharded"])
@pytest.mark.parametrize("name", ["hf:phi3", "llama tied", "uneven"])
def test_beside_fsdp(ranks: RankPool, name: str, way: str) -> None:
    check(ranks, name, (2, 2), "pickle" if way == "meta" else "one", way)


@pytest.mark.parametrize("name", ["hf:llama", "uneven"])
def test_on_one_rank(ranks: RankPool, name: str) -> None:
    payload = {"name": name, "shape": (1,), "kind": "one", "way": "meta"}
    (answer, *rest) = ranks.run("tests.exact.loading_tasks:loaded", payload, timeout=SECONDS)
    assert rest == [None] * 3
    assert answer["wrong"] == answer["meta"] == []
    assert answer["share"] == 1.0


def test_what_a_file_lacks_is_drawn(ranks: RankPool) -> None:
    for answer in ranks.run("tests.exact.loading_tasks:completed", {}, timeout=SECONDS)[:2]:
        assert answer["meta"] == ["head.weight", "head.bias"]
        assert answer["wrong"] == []


@pytest.mark.parametrize("bad", [None, 1], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", ["up.weight is not in"]),
        ("dtype", ["up.weight is float32", "float64"]),
        ("shape", ["up.weight has shape [37, 23]", "[37, 24]"]),
        ("unexpected", ["stray.weight"]),
        ("truncated", ["truncated", "ends at byte"]),
        ("nothing", ["no such file"]),
    ],
)
def test_faults_are_raised_on_all_ranks_before_anything_changes(
    ranks: RankPool, fault: str, words: list[str], bad: int | None
) -> None:
    answers = ranks.run("tests.exact.loading_tasks:refused", {"fault": fault, "bad": bad}, timeout=SECONDS)[:2]
    for rank, answer in enumerate(answers):
        for word in [*words, ".safetensors", *(["rank 1 of 2: "] if bad == 1 and rank == 0 else [])]:
            assert word in answer["text"]
        assert answer["untouched"]
        assert answer["works afterwards"]
