"""Sequence parallelism: exact on every Transformer, at every length; less is kept for the backward."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.ranks import RankPool
from tests.harness.params import one_size_each
from tests.models import registry
from tests.models.sequence import ODD

pytestmark = pytest.mark.slow

OTHERS = ("timm:convnext", "user:mixer", "user:keywords", "user:recurrent")
VISION = {"tv:vit_b_16", "tv:swin_t"}  # the Transformers of torchvision
TRANSFORMERS = [n for n in registry.names() if n in VISION or not n.startswith(("tv:", *OTHERS))]


def found(ranks: RankPool, task: str, **payload: Any) -> Any:
    """What all ranks answer."""
    return ranks.run(f"tests.exact.sequence_tasks:{task}", payload)


def _parameters() -> list[object]:
    pairs = [(name, tp) for tp in (2, 4) for name in TRANSFORMERS]
    return [pytest.param(name, tp, id=f"{name}-tp{tp}", marks=[pytest.mark.long] * (tp == 4)) for name, tp in pairs]


@pytest.mark.parametrize(("name", "tp"), _parameters())
def test_exact(ranks: RankPool, name: str, tp: int) -> None:
    figures = found(ranks, "exact", name=name, tp=tp)[0]
    assert figures["ok"], figures
    assert figures["promoted"]
    assert figures["scattered"] >= 2, f"no tokens were cut: {figures['told']}"
    assert figures["cut_share"] >= registry.ENTRIES[name].share


@pytest.mark.parametrize(
    ("name", "tp", "lengths"),
    [
        ("user:nanogpt", 2, [12, 8, 7, 2, 1, 12]),
        ("user:nanogpt", 4, [12, 5, 3, 1]),
        ("hf:llama", 2, [12, 9, 1]),
        ("hf:bloom", 2, [12, 9, 1]),
        ("hf:t5", 2, [(12, 9), (7, 7), (8, 1), (1, 6)]),
    ],
)
def test_all_lengths_give_the_same_numbers(ranks: RankPool, name: str, tp: int, lengths: list[Any]) -> None:
    """Uneven slices; with fewer tokens than ranks the call runs without, and says so once."""
    for answer in found(ranks, "lengths", name=name, tp=tp, lengths=lengths)[:tp]:
        told: set[int] = set()
        for length, one in zip(lengths, answer, strict=True):
            assert not one["problems"], (length, one)
            assert one["forward"] <= 1e-12, (length, one)
            assert one["gradient"] <= 1e-12, (length, one)
            few = [n for n in (length if isinstance(length, tuple) else (length,)) if n < tp and n not in told]
            told.update(few)
            assert len(one["notices"]) == len(few), (length, one)
            assert all(f"with {n} token" in text for n, text in zip(few, one["notices"], strict=True))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("lengths", [(12, 7), (12, 1)], ids=str)
def test_blocks_are_recomputed_with_their_own_length(ranks: RankPool, lengths: tuple[int, int], together: bool) -> None:
    for tp in (2, 4):
        answer = found(ranks, "recompute", tp=tp, lengths=lengths, together=together)[0]
        assert answer["gradient"] <= 1e-12


def test_lengths_that_were_equal_in_the_sample_must_stay_equal(ranks: RankPool) -> None:
    for text in found(ranks, "refused")[:2]:
        assert "have 8 and 1 of them" in text


def test_each_rank_drops_among_its_own_tokens(ranks: RankPool) -> None:
    answers = found(ranks, "masks")
    first = answers[0]
    assert all(a["outputs"] == first["outputs"] for a in answers), "ranks give different outputs"
    assert first["outputs"][0] == first["outputs"][1], "the same seed gave another result"
    masks = [str(a["mask"]) for a in answers]
    assert len(set(masks)) == 4, "two ranks dropped the same elements"
    assert all(len(a["mask"][0]) == 2 for a in answers), "a rank has 2 of 8 tokens"
    assert all(a["short"] == first["short"] and len(a["short"][0]) == 2 for a in answers), "2 tokens are not cut over 4"
    assert all(a["short_output"] == first["short_output"] for a in answers)


@pytest.mark.parametrize(
    ("name", "blocks", "norms"),
    [
        ("user:nanogpt", "blocks", ["norm_1", "norm_2"]),
        ("hf:llama", "model.layers", ["post_attention_layernorm"]),
        ("hf:bert", "bert.encoder.layer", ["output.LayerNorm"]),
    ],
)
def test_half_is_kept_between_the_layers(ranks: RankPool, name: str, blocks: str, norms: list[str]) -> None:
    shares = found(ranks, "saved", name=name, blocks=blocks, norms=norms)[0]
    assert shares["saved by norms"] <= 0.55, shares
    assert shares["handed on"] <= 0.55 or name == "hf:bert", shares  # after a norm, bert hands on what attention reads


@pytest.mark.parametrize(("name", "tp"), one_size_each(sorted(ODD)))
def test_whatever_is_done_to_tokens_is_right_at_every_length(ranks: RankPool, name: str, tp: int) -> None:
    """What mixes or moves tokens gets all of them; what counts them counts all of them."""
    lengths = [8, 12, 4, 2] if name == "windows" else [8, 11, 4, 2, 1]
    answer = found(ranks, "odd", name=name, tp=tp, lengths=lengths)[0]
    assert all(error <= 1e-12 for error in answer["errors"].values()), answer
    assert answer["scattered"] >= 1, "no tokens were cut, so nothing was tested"
