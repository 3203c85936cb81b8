"""The plan files in `plans/`: each is what the tool makes today, by the command in its header, and right in numbers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from autotp.models import load_spec
from autotp.plan_types import Plan
from autotp.planning import plan
from autotp.ranks import RankPool
from tests.models import families

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "plans").glob("*.toml"))

SHORT = {"convnext_tiny", "gpt2_medium", "mistral_7b", "resnet50"}
NUMBERS = {"deepseek_v3", "gpt_oss_120b", "gemma_2_27b", "llava_1_5_7b", "dinov2_large",
           "qwen3_235b_a22b"}  # fmt: skip
LIMIT = {"dinov2_large": 0.98}


def _marked(names: list[str], short: set[str]) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name not in short)) for name in names]


def _words(path: Path) -> list[str]:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return shlex.split(first.removeprefix("# "))


@pytest.mark.parametrize("name", _marked([path.stem for path in FILES], SHORT))
def test_is_what_the_tool_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "plans" / f"{name}.toml"
    saved, words = Plan.load(path), _words(path)
    assert words[:2] == ["autotp", "plan"] and words[-1] == f"plans/{name}.toml", words
    loaded = load_spec(words[2])
    made = plan(loaded.model, saved.tp, sample=loaded.sample)
    assert saved.parameters == made.parameters, saved.diff(made)
    assert saved.collectives == made.collectives
    assert saved.cut_share > 0.98


def test_there_are_plans_for_the_families_that_people_use() -> None:
    assert len(FILES) >= 34
    assert {path.stem for path in FILES} >= set(families.names())
    assert {path.stem for path in FILES} >= SHORT and set(families.names()) >= NUMBERS


@pytest.mark.parametrize("name", _marked(families.names(), NUMBERS))
def test_its_choices_are_exact_on_a_tiny_model(ranks: RankPool, name: str) -> None:
    figures = ranks.run("tests.exact.family_tasks:measure_family", name)[0]
    assert figures["promoted"], figures["obstacle"]
    assert figures["ok"], "\n".join([*figures["problems"], figures["first_bad"], *figures["wrong_gradients"]])
    assert figures["cut_share"] >= LIMIT.get(name, 0.99), f"only {figures['cut_share']:.1%} of the weight bytes are cut"
