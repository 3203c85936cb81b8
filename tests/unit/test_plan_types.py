import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from sample_plans import llama_like, make_plan, mlp, row

from autotp.errors import AutotpError, PlanError
from autotp.plan_types import Axes, itemsize


def test_memory_is_what_the_hand_calculation_of_k53_says():
    plan = mlp(tp=4)
    assert plan.memory.parameters == 33_088 * 4
    assert plan.memory.local_parameters == 33_280
    assert (plan.memory.gradients, plan.memory.optimizer) == (33_280, 2 * 33_280)


def test_a_tied_parameter_counts_once():
    weight = row("embed.weight", (8, 4), "embedding_rowwise", 0)
    tied = replace(weight, name="head.weight", tied_to="embed.weight")
    assert make_plan([weight, tied]).memory == make_plan([weight]).memory
    assert make_plan([weight, tied, row("fc.weight", (8, 4))]).cut_share == 0.5


def test_cut_share_counts_matrices_only():
    assert mlp().cut_share == 1.0
    assert make_plan([row("norm.weight", (8,))]).cut_share == 0.0


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("int64", 8),
        ("uint8", 1),
        ("bool", 1),
        ("complex64", 8),
        ("torch.float16", 2),
    ],
)
def test_itemsize(dtype, size):
    assert itemsize(dtype) == size


def test_a_plan_is_frozen_comparable_and_hashable():
    plan = llama_like()
    assert plan == llama_like() and hash(plan) == hash(llama_like())
    assert plan != llama_like(tp=4)
    with pytest.raises(FrozenInstanceError):
        plan.model = "other"
    with pytest.raises(TypeError):
        plan.mesh["tp"] = 4


def test_a_plan_survives_pickle_and_copy():
    plan = llama_like()
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)


def test_mesh_reads_like_a_dict():
    axes = Axes({"dp": 4, "tp": 2})
    assert axes == {"tp": 2, "dp": 4} and dict(axes) == {"dp": 4, "tp": 2}
    assert str(axes) == "dp=4, tp=2"
    assert make_plan([], tp=8).tp == 8
    with pytest.raises(AttributeError):
        axes.tp = 3


def test_repr_is_one_short_line():
    assert repr(mlp()) == "<Plan mlp on tp=4: 3 of 4 parameters cut, 100.0% of weight bytes>"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.o_proj.weight",
        "model.layers.3.self_attn.o_proj",
        "model.layers.{3..31}.self_attn.o_proj.weight",
    ],
)
def test_explain_takes_names_as_tables_show_them(name):
    text = llama_like().explain(name)
    assert text.startswith("model.layers.3.self_attn.o_proj.weight\n")
    assert "closes the cut of model.layers.3.self_attn.v_proj" in text
    assert "rowwise (cut along dim 1 over tp=2)" in text
    assert "model.layers.3.self_attn.q_proj.weight" in text.partition("Neighbours")[2]
    assert "all_reduce forward, 4,096 bytes" in text


def test_explain_shows_the_findings_of_its_module():
    text = llama_like().explain("model.layers.3.norm.weight")
    assert "warning: TP-WHOLE model.layers.3.norm: " in text
    assert "layers.4" not in text


def test_explain_of_the_root_module():
    assert "(model)" in mlp().explain("0.weight")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("model.layers.3.self_attn.q_prj", "Did you mean: model.layers.3.self_attn.q_proj.weight"),
        ("up_proj", "Did you mean: model.layers.0.mlp.up_proj.weight"),
        ("q_prj", "Did you mean: model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.3.mlp", "It holds: model.layers.3.mlp.up_proj.weight, model.layers.3.mlp.down_proj.weight"),
        ("zzz", "The plan has 226 parameters"),
    ],
)
def test_explain_of_an_unknown_name_names_the_nearest(asked, hint):
    with pytest.raises(PlanError) as caught:
        llama_like().explain(asked)
    assert hint in str(caught.value) and asked in str(caught.value)
    assert caught.value.code == "TP-NAME"
    assert isinstance(caught.value, (AutotpError, ValueError))
