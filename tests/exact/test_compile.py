"""torch.compile of sharded models: equal to the unsharded model, or refused by name."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow
SECONDS = 400.0


def run(ranks: RankPool, task: str, **payload: Any) -> dict[str, Any]:
    """What rank 0 finds."""
    found: dict[str, Any] = ranks.run(f"tests.exact.compile_tasks:{task}", payload, timeout=SECONDS)[0]
    return found


def is_exact(found: dict[str, Any]) -> None:
    """Forward and all gradients, twice; and something was cut."""
    assert "refused" not in found, found["refused"]
    assert found["forward"] <= 1e-12, found
    assert found["gradient"] <= 1e-12, found
    assert found["recompiled"] == 0
    assert found["held"] <= 0.55, "nothing was cut, so nothing was tested"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("hf:llama", "whole"),
        pytest.param("hf:gpt2", "whole", marks=pytest.mark.long),
        ("user:nanogpt", "whole"),
        ("user:titan_llama", "blocks"),
        pytest.param("user:einsum", "module", marks=pytest.mark.long),
        pytest.param("plain", "whole", marks=pytest.mark.long),
        ("plain", "blocks"),
        pytest.param("plain", "function", marks=pytest.mark.long),
        ("raw", "whole"),
        ("checkpointed", "whole"),
        ("branching", "whole"),
        ("branching_norm", "whole"),
    ],
)
def test_exact(ranks: RankPool, name: str, how: str) -> None:
    found = run(ranks, "compare", name=name, how=how)
    is_exact(found)
    assert found["graphs"] == (2 if (name, how) == ("plain", "blocks") else 1)  # its first input has no gradient


@pytest.mark.long
def test_graphs_run_as_they_are(ranks: RankPool) -> None:
    is_exact(run(ranks, "compare", name="plain", backend="eager"))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(ranks: RankPool) -> None:
    is_exact(run(ranks, "compare", name="plain", backend="inductor"))


@pytest.mark.parametrize(
    "name",
    [
        "break_helper",
        pytest.param("break_middle", marks=pytest.mark.long),
        pytest.param("break_between", marks=pytest.mark.long),
    ],
)
def test_graphs_may_break(ranks: RankPool, name: str) -> None:
    found = run(ranks, "compare", name=name, fullgraph=False)
    is_exact(found)
    assert found["graphs"] > 1


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plain", "whole"),
        pytest.param("plain", "blocks", marks=pytest.mark.long),
        pytest.param("user:nanogpt", "whole", marks=pytest.mark.long),
        pytest.param("hf:llama", "whole", marks=pytest.mark.long),
        pytest.param("user:titan_llama", "blocks", marks=pytest.mark.long),
    ],
)
def test_exact_with_tokens_cut(ranks: RankPool, name: str, how: str) -> None:
    found = run(ranks, "compare", name=name, how=how, sp=True)
    is_exact(found)
    assert found["graphs"] == (3 if (name, how) == ("plain", "blocks") else 1)  # tokens are cut in one, joined in one


@pytest.mark.parametrize("sp", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plain", "blocks"),
        pytest.param("user:titan_llama", "blocks", marks=pytest.mark.long),
        pytest.param("plain", "whole", marks=pytest.mark.long),
        pytest.param("user:nanogpt", "whole", marks=pytest.mark.long),
    ],
)
def test_exact_beside_fsdp(ranks: RankPool, name: str, how: str, sp: bool) -> None:
    """torch keeps the hooks of FSDP2 out of graphs, so a whole model falls into pieces."""
    found = run(ranks, "compare", name=name, how=how, sp=sp, dp=2, fullgraph=how == "blocks")
    is_exact(found)
    assert found["graphs"] == (2 + sp if name == "plain" else 1) if how == "blocks" else found["graphs"] > 1


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "sp", "lengths"),
    [
        pytest.param("raw", True, (12, 8, 16, 4), marks=LONG),
        pytest.param("user:titan_llama", False, (12, 9, 7, 5, 11), marks=LONG),
        pytest.param("user:nanogpt", False, (12, 9, 7, 5, 11), marks=LONG),
    ],
)
def test_new_shapes_compile_as_often_as_without_sharding(
    ranks: RankPool, name: str, sp: bool, lengths: tuple[int, ...]
) -> None:
    found = run(ranks, "shapes", name=name, sp=sp, lengths=lengths)
    assert found["error"] <= 1e-12
    for unsharded, sharded in found["counts"]:
        assert sharded == unsharded


@pytest.mark.parametrize(
    ("name", "how", "sp"), [("many", "alike", False), pytest.param("user:titan_llama", "blocks", True, marks=LONG)]
)
def test_blocks_that_are_alike_are_compiled_once(ranks: RankPool, name: str, how: str, sp: bool) -> None:
    """As without sharding; torch refuses to compile a place in the code more than eight times."""
    found = run(ranks, "shapes", name=name, how=how, sp=sp, lengths=(12, 8, 16, 4), backend="eager")
    assert found["error"] <= 1e-12
    for unsharded, sharded in found["counts"]:
        assert sharded == unsharded
        assert unsharded[0] == 1


def test_tokens_are_cut_in_graphs_for_lengths_that_divide_and_for_others(ranks: RankPool) -> None:
    """One graph for the first length, one for each kind; further lengths of a kind are not compiled again."""
    found = run(ranks, "shapes", name="raw", sp=True, lengths=(12, 9, 7, 8, 5, 6, 11, 10))
    assert found["error"] <= 1e-12
    for _, sharded in found["counts"]:
        assert sharded[1:3] == sharded[1:2] * 2, "compiled again for another length that does not divide"
        assert sharded[3:] == sharded[3:4] * 5, "compiled again for a further length"
        assert sharded[-1] == 3 * sharded[0]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_dropout(ranks: RankPool, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    found = run(ranks, "draws", name="dropout_feed", backend=backend)
    assert found["outputs_agree"]
    assert found["again"] == 0, "equal seeds, other numbers"
    assert found["other"] > 0, "other seeds, equal numbers"
    assert found["masks"][0] != found["masks"][1], "both ranks dropped the same features of theirs"


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"name": "alpha_dropout", "train": True}, "alpha_dropout draws random numbers for a rank's part"),
        ({"name": "dropout", "train": True, "how": "function"}, "compile the model, or its blocks"),
        ({"name": "raw", "hide": "matmul"}, "0: matmul at compile_models.py"),
        ({"name": "plain", "hide": "matmul"}, "the model: matmul at compile_models.py"),
    ],
)
def test_refused_by_name(ranks: RankPool, payload: dict[str, Any], text: str) -> None:
    assert text in run(ranks, "compare", **payload).get("refused", "")


def test_a_compiled_model_generates_as_it_is_written(ranks: RankPool) -> None:
    found = run(ranks, "generates", name="hf:llama")
    assert found["tokens"] == [True, True]
    assert found["error"] <= 1e-12
    assert found["graphs"] == [1, 1], "generating was compiled, or what was compiled is lost"
