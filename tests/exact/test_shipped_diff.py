"""`--diff-shipped`: our plans beside transformers' own, and what is told of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autotp
from autotp import cli
from autotp.errors import PlanError
from autotp.shipped import Comparison, compare
from tests.models import families

pytestmark = pytest.mark.slow


def compared(name: str, tp: int = 2) -> Comparison:
    model, args, kwargs = families.build(name)
    return compare(model, autotp.plan(model, tp=tp, sample=(args, kwargs)), (args, kwargs))


def kinds(comparison: Comparison) -> dict[str, str]:
    """Kind by folded name."""
    return {name: pair.kind for pair, name, _ in comparison.folded()}


def test_two_plans_that_agree() -> None:
    comparison = compared("llama_3_1_8b")
    assert comparison.ok and set(kinds(comparison).values()) == {"same"}
    assert comparison.theirs_cut_share == comparison.plan.cut_share == 1.0
    assert comparison.counts["same"] == len(comparison.plan.parameters)


def test_what_only_ours_cuts() -> None:
    comparison = compared("gpt_neox_20b")
    assert kinds(comparison)["gpt_neox.embed_in.weight"] == "ours only"
    assert comparison.ok and comparison.theirs_cut_share < comparison.plan.cut_share


def test_what_theirs_gathers() -> None:
    found = kinds(compared("phi_4"))
    assert found["model.layers.{0..1}.self_attn.qkv_proj.weight"] == "gathered"
    assert found["model.layers.{0..1}.mlp.down_proj.weight"] == "gathered"


def test_what_only_theirs_cuts() -> None:
    model, args, kwargs = families.build("llama_3_1_8b")
    ours = autotp.plan(model, tp=2, sample=(args, kwargs), rules={"*.up_proj": "replicate", "*.down_proj": "replicate"})
    comparison = compare(model, ours, (args, kwargs))
    assert not comparison.ok
    assert kinds(comparison)["model.layers.{0..1}.mlp.up_proj.weight"] == "theirs only"
    assert comparison.folded()[0][0].kind == "theirs only"


@pytest.mark.parametrize(("name", "tp"), [("llama_3_1_8b", 8), ("qwen3_235b_a22b", 2)])
def test_more_ranks_than_key_heads_make_theirs_unsound(name: str, tp: int) -> None:
    comparison = compared(name, tp)
    assert not comparison.ok
    assert any(f.code == "TP-UNSOUND" and "k_proj" in f.where for f in comparison.findings)


def test_styles_that_are_not_known() -> None:
    model, args, kwargs = families.build("llama_3_1_8b")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "colwise_by_magic"}
    comparison = compare(model, autotp.plan(model, tp=2, sample=(args, kwargs)), (args, kwargs))
    assert not comparison.ok
    assert kinds(comparison)["model.layers.{0..1}.mlp.up_proj.weight"] == "unknown"
    assert comparison.findings[0].code == "TP-STYLE"


def test_a_model_without_a_shipped_plan() -> None:
    model, args, kwargs = families.build("opt_6_7b")
    with pytest.raises(PlanError, match="ships no tp_plan for OPTForCausalLM"):
        compare(model, autotp.plan(model, tp=2, sample=(args, kwargs)), (args, kwargs))


@pytest.fixture
def config(tmp_path: Path) -> str:
    values = families.config_of("phi_4").to_dict()
    path = tmp_path / "phi.json"
    path.write_text(json.dumps(values, default=str))
    return f"hf:{path}"


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = cli.run(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_on_the_command_line(config: str, capsys: Any) -> None:
    code, out, err = run(capsys, "plan", config, "--tp", "2", "--diff-shipped")
    assert code == 0, err
    assert "beside the one that transformers ships" in out
    assert "model.layers.{0..1}.self_attn.qkv_proj.weight" in out and "by theirs" in out
    code, out, err = run(capsys, "plan", config, "--tp", "2", "--diff-shipped", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == 1 and document["mesh"] == {"tp": 2}
    assert set(document) == {"schema", "model", "mesh", "counts", "cut_share", "parameters", "findings"}
    assert set(document["parameters"][0]) == {"name", "shape", "ours", "theirs", "kind", "note"}


def test_findings_and_bad_input_have_their_codes(config: str, capsys: Any) -> None:
    code, out, _ = run(capsys, "plan", config, "--tp", "2", "--diff-shipped", "--set", "lm_head=replicate")
    assert code == 1 and "theirs only" in out
    code, out, err = run(capsys, "plan", "autotp.demo_models:Block", "--tp", "2", "--diff-shipped")
    assert code == 2 and out == "" and "TP-NO-SHIPPED: transformers ships no tp_plan for Block" in err


def test_a_plan_file_of_styles(config: str, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "tp_plan.json"
    path.write_text(
        json.dumps({"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"})
    )
    code, out, _ = run(capsys, "plan", config, "--tp", "2", "--plan", str(path), "--json")
    styles = {row["name"]: row["style"] for row in json.loads(out)["parameters"]}
    assert code == 0 and styles["model.layers.1.mlp.gate_up_proj.weight"] == "packed_colwise"
    assert styles["model.layers.1.self_attn.o_proj.weight"] == "replicate"
    path.write_text(
        json.dumps({"model.layers.*.mlp.gate_up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"})
    )
    code, out, err = run(capsys, "plan", config, "--tp", "2", "--plan", str(path))
    assert code == 2 and out == "" and "TP-UNSOUND: the plan given is unsound over 2 ranks" in err


def test_verify_takes_them_too(config: str, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "tp_plan.json"
    path.write_text(json.dumps({"lm_head": "colwise_gather_output"}))
    code, out, err = run(capsys, "verify", config, "--tp", "2", "--plan", str(path), "--json")
    assert code == 0, err
    assert 0 < json.loads(out)["cut_share"] < 0.5
