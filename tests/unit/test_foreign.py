"""Plans by others: how they are read and matched, and how what is wrong with them is told."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import autotp
from autotp.errors import PlanError
from autotp.foreign import Claim, ForeignPlan, load, resolve

X = torch.ones(2, 8)


class MLP(nn.Module):
    def __init__(self, inner=16):
        super().__init__()
        self.up, self.down = nn.Linear(8, inner), nn.Linear(inner, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    base_model_prefix = "model"

    def __init__(self, layers=5, inner=16):
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList(MLP(inner) for _ in range(layers))})

    def forward(self, x):
        for layer in self.model["layers"]:
            x = layer(x)
        return x


ROWS = {"up": "colwise", "down": "rowwise"}


def stated(model, plan):
    claims = resolve(model, load(plan))
    return {name: (claim.style, claim.dim) for name, claim in claims.params.items()}


# reading


def test_dicts_and_files_of_styles(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(ROWS))
    assert load(ROWS) == load(file) == load(str(file)) == ForeignPlan(rows=tuple(ROWS.items()))


def test_plans_of_ours_come_back_as_they_are(tmp_path):
    plan = autotp.plan(MLP(), tp=2, sample=X)
    plan.save(tmp_path / "plan.toml")
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    assert load(plan) == load(tmp_path / "plan.toml") == load(tmp_path / "plan.json") == plan
    assert load(None) is None


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({}, "is an empty dict"),
        (3, "not a int"),
        ({"up": "colwize"}, "no support for style 'colwize'. Did you mean: colwise"),
        ({"up": "sequence_parallel"}, "sequence_parallel is not available in a plan by others"),
        ({"up": SequenceParallel()}, "no support for SequenceParallel"),
        ({"up": ColwiseParallel(input_layouts=Shard(1))}, r"ColwiseParallel with input_layouts=Shard\(1\)"),
        ({"up": ColwiseParallel(use_local_output=False)}, "hands DTensors to your code"),
        (
            {"": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())},
            r"PrepareModuleInput between other layouts than Replicate\(\)",
        ),
    ],
)
def test_what_there_is_no_support_for(plan, text):
    with pytest.raises(PlanError, match=text):
        load(plan)


@pytest.mark.parametrize(
    ("content", "text"), [("{", "not JSON"), ("[1]", "a plan in JSON is"), ('{"a": 1}', "a plan in JSON is")]
)
def test_files_that_hold_no_plan(tmp_path, content, text):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match=text):
        load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_stock_styles_by_name():
    plan = {
        "a": ColwiseParallel(),
        "b": ColwiseParallel(output_layouts=Replicate()),
        "c": RowwiseParallel(),
        "d": RowwiseParallel(input_layouts=Replicate()),
        "e": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "f": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
    }
    assert load(plan) == ForeignPlan(
        rows=(("a", "colwise"), ("b", "colwise_gather_output"), ("c", "rowwise"), ("d", "rowwise_split_input")),
        globs=True,
    )


# matching


def test_a_parameters_own_row_goes_before_its_modules():
    rows = {"up": "colwise", "up.bias": "replicate", "down": "rowwise"}
    assert stated(MLP(), rows) == {
        "up.weight": ("colwise", 0),
        "up.bias": ("replicate", None),
        "down.weight": ("rowwise", 1),
        "down.bias": ("rowwise", None),
    }


def test_stars_stand_for_numbers_and_in_torch_for_any_name():
    model = Stack(2)
    theirs = stated(model, {"model.layers.*.up": "colwise"})
    assert {name for name, (style, _) in theirs.items() if style} == {
        f"model.layers.{i}.up.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    }
    with pytest.raises(PlanError, match="no row of the plan given matches"):
        stated(model, {"model.layers.0.*": "colwise"})
    by_torch = stated(model, {"model.*.0.u*": ColwiseParallel()})
    assert {name for name, (style, _) in by_torch.items() if style} == {
        "model.layers.0.up.weight",
        "model.layers.0.up.bias",
    }


def test_a_plan_for_the_base_model():
    assert stated(Stack(2), {"layers.*.up": "colwise"})["model.layers.1.up.weight"] == ("colwise", 0)


def test_rows_that_match_nothing_are_told_and_all_of_them_refused():
    plan = autotp.plan(MLP(), tp=2, sample=X, plan={**ROWS, "gate": "colwise"})
    assert [finding.message for finding in plan.findings if finding.code == "TP-UNUSED"] == [
        "row 'gate' matches nothing in the model"
    ]
    with pytest.raises(PlanError, match="no row of the plan given matches anything in MLP: gate"):
        autotp.plan(MLP(), tp=2, sample=X, plan={"gate": "colwise"})


def test_two_rows_for_one_module():
    with pytest.raises(PlanError, match=r"up is matched by 2 rows .*: \*, u\*"):
        stated(MLP(), {"*": ColwiseParallel(), "u*": ColwiseParallel()})


def test_tied_names_must_agree():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(self.emb(ids))

    with pytest.raises(PlanError, match=r"head.weight is emb.weight: .* dim 0 \('head': colwise"):
        stated(Tied(), {"emb": "embedding_colwise", "head": "colwise"})


@pytest.mark.parametrize(
    ("parts", "size", "tp", "ranks"),
    [
        (1, 4, 2, [0, 0, 1, 1]),
        (1, 5, 2, [0, 0, 0, 1, 1]),
        (2, 8, 2, [0, 0, 1, 1, 0, 0, 1, 1]),
        (1, 4, 3, [0, 0, 1, 1]),
    ],
)
def test_where_a_claim_puts_each_index(parts, size, tp, ranks):
    assert Claim(parts=parts).ranks(size, tp) == ranks


# following


def test_a_sound_plan_is_taken_over_row_by_row():
    plan = autotp.plan(Stack(), tp=2, sample=X, plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    assert plan.row("model.layers.3.up").style == "colwise" and plan.row("model.layers.3.down").style == "rowwise"
    gathered = autotp.plan(
        Stack(), tp=2, sample=X, plan={"layers.*.up": "colwise_gather_output", "layers.*.down": "rowwise_split_input"}
    )
    assert gathered.row("model.layers.3.up").style == "colwise_gather_output"
    assert gathered.row("model.layers.3.up").reason.endswith("its output is gathered: by choice")
    assert gathered.row("model.layers.3.down").style == "rowwise_split_input"


def test_layers_treated_differently():
    rows = {f"model.layers.{i}.{name}": style for i in (1, 3) for name, style in ROWS.items()}
    plan = autotp.plan(Stack(), tp=2, sample=X, plan=rows)
    assert [plan.row(f"model.layers.{i}.up").style for i in range(5)] == [
        "replicate",
        "colwise",
        "replicate",
        "colwise",
        "replicate",
    ]


def test_faults_are_folded_and_have_a_code():
    with pytest.raises(PlanError) as raised:
        autotp.plan(Stack(), tp=2, sample=X, plan={"layers.*.down": "rowwise"})
    assert raised.value.code == "TP-UNSOUND"
    assert str(raised.value) == (
        "the plan given is unsound over 2 ranks:\n"
        "  model.layers.{0..4}.down.weight: its input is whole: 16 features meet a rank's 8; no row cuts what feeds it "
        "(row 'model.layers.*.down': rowwise) [5 times]"
    )


def test_more_ranks_than_rows_of_a_matrix():
    with pytest.raises(PlanError, match=r"up.weight: 16 along dim 0 leave some of 17 ranks with none"):
        autotp.plan(MLP(), tp=17, sample=X, plan=ROWS)


def test_what_the_analysis_has_no_answer_to_is_not_called_unsound():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, how):
            return how(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad, None

    class Unknown(MLP):
        def forward(self, x):
            return self.down(Double.apply(self.up(x), lambda x: 2 * x))

    with pytest.raises(PlanError, match="cannot be proved over 2 ranks") as raised:
        autotp.plan(Unknown(), tp=2, sample=X, plan=ROWS)
    assert raised.value.code == "TP-UNPROVEN"


def test_own_choices_beside_such_a_plan_are_refused():
    with pytest.raises(PlanError, match="cannot be joined with a plan that autotp did not make"):
        autotp.plan(MLP(), tp=2, sample=X, plan=ROWS, rules={"up": "replicate"})


def test_a_layer_of_another_kind():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Conv1d(8, 16, 1)

        def forward(self, x):
            return self.up(x[..., None])

    with pytest.raises(PlanError, match="up: is a Conv1d, but colwise is for linear layers"):
        autotp.plan(Other(), tp=2, sample=X, plan={"up": "colwise"})
