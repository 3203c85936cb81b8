"""Plans by others: what autotp says of them, and what then happens when others run them and when autotp does."""

from __future__ import annotations

from typing import Any

import pytest

import autotp
from autotp.errors import PlanError
from autotp.ranks import RankPool
from tests.exact.foreign_tasks import CASES, LATENT, built, shared_key, stock
from tests.models import families

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_what_happens(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    model, x, rows = built(name)
    said, warned = "", False
    try:
        made = autotp.plan(model, tp=case.tp, sample=(x,), plan=stock(rows))
        warned = any(finding.code == "TP-STOCK" for finding in made.findings)
    except PlanError as error:
        assert error.code == "TP-UNSOUND", error
        said = str(error)
    for piece in case.says:
        assert piece in said
    assert bool(said) == bool(case.says), said
    assert warned == case.warns
    happened = ranks.run("tests.exact.foreign_tasks:run_stock", name, timeout=90)[0]
    wrong = bool(happened["raised"]) or max(happened["out"], happened["grad"]) > 1e-9
    assert wrong == bool(said or warned), happened


LAYER = "model.layers.*."
THEIRS = ["llama_3_1_8b", "qwen2_5_72b", "qwen3_32b", "mixtral_8x7b", "phi_4", "deepseek_v3",
          "gpt_neox_20b", "olmo2_7b", "gpt_oss_120b", "mistral_7b"]  # fmt: skip
CHANGED = {
    "qwen3_32b": ({"self_attn.q_norm": "replicate"}, "q_norm.weight: its gradient would be a rank's part only"),
    "mixtral_8x7b": ({"mlp.experts": "replicate"}, "gives a sum in parts, and no row has it summed over the ranks"),
    "phi_4": ({"mlp.gate_up_proj": "colwise", "mlp.down_proj": "rowwise"}, "gate_up_proj.weight: indices"),
    "olmo2_7b": ({"self_attn.q_proj": "colwise"}, "q_proj"),
    "llama_3_1_8b": ({"self_attn.q_proj": "replicated_with_grad_allreduce"}, "q_proj.weight"),
}


def _build(name: str) -> tuple[Any, Any, dict[str, str]]:
    model, args, kwargs = families.build(name)
    return model, (args, kwargs), dict(model.tp_plan)


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_own_plan(ranks: RankPool, name: str) -> None:
    model, sample, rows = _build(name)
    made = autotp.plan(model, tp=2, sample=sample, plan=rows)
    assert not [finding for finding in made.findings if finding.code == "TP-STOCK"]
    happened = ranks.run("tests.exact.foreign_tasks:run_theirs", (name, None), timeout=120)[0]
    assert not happened["raised"]
    assert max(happened["out"], happened["grad"]) < 1e-9, happened


@pytest.mark.parametrize("name", CHANGED)
def test_one_wrong_row_of_it(ranks: RankPool, name: str) -> None:
    model, sample, rows = _build(name)
    change, says = CHANGED[name]
    rows |= {LAYER + key: style for key, style in change.items()}
    with pytest.raises(PlanError) as raised:
        autotp.plan(model, tp=2, sample=sample, plan=rows)
    assert raised.value.code == "TP-UNSOUND"
    assert says in str(raised.value)
    happened = ranks.run("tests.exact.foreign_tasks:run_theirs", (name, rows), timeout=120)[0]
    assert happened["raised"] or max(happened["out"], happened["grad"]) > 1e-6, happened


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        (
            {"kv_a": "replicate"},
            "kv_a.weight: its gradient would be a rank's part only",
        ),
        (
            {"kv_b": "replicate", "q": "replicate", "o": "replicate"},
            "kv_a: the gradient of its last 4 outputs is complete",
        ),
    ],
)
def test_the_gradient_of_a_shared_rotary_key(ranks: RankPool, change: dict[str, str], says: str) -> None:
    model, x = shared_key()
    rows = LATENT | change
    if says:
        with pytest.raises(PlanError, match=says):
            autotp.plan(model, tp=2, sample=(x,), plan=rows)
    else:
        assert autotp.plan(model, tp=2, sample=(x,), plan=rows).row("o").style == "rowwise"
    happened = ranks.run("tests.exact.foreign_tasks:run_latent", rows, timeout=120)[0]
    assert not happened["raised"]
    assert (max(happened["out"], happened["grad"]) > 1e-9) == bool(says), happened
