import ast
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import llama_like, make_plan, mlp, row

from autotp import plans_io
from autotp.errors import PlanError
from autotp.folding import fold_names, fold_rows, mark, unfold_name, unmark
from autotp.plan_types import Collective, Finding, Plan

# Folding


def patterns(*names):
    return [fold.pattern for fold in fold_names([(name, None) for name in names])]


def test_folding_of_ranges_lists_and_both():
    assert patterns("a.0.b", "a.1.b", "a.2.b") == ["a.{0..2}.b"]
    assert patterns("a.0.b", "a.2.b", "a.5.b") == ["a.{0,2,5}.b"]
    assert patterns(*(f"a.{i}.b" for i in (0, 1, 2, 3, 7, 9, 10))) == ["a.{0..3,7,9,10}.b"]
    assert patterns("a.0.b", "c.0.b", "a.b") == ["a.0.b", "c.0.b", "a.b"]


def test_folding_of_two_numbers_at_once():
    names = [f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)]
    assert patterns(*names) == ["l.{0..2}.e.{0..3}.w"]
    assert patterns(*names[:-1]) == ["l.{0,1}.e.{0..3}.w".replace("0,1", "0..1"), "l.2.e.{0..2}.w"]


def test_only_plain_numbers_fold():
    assert patterns("a.w1", "a.w2", "a.01", "a.1") == ["a.w1", "a.w2", "a.01", "a.1"]


def test_different_keys_do_not_fold():
    assert len(fold_names([("a.0", "x"), ("a.1", "y")])) == 2


def test_the_same_name_twice_is_never_hidden():
    folds = fold_names([("a.0", None), ("a.0", None), ("a.1", None)])
    assert sorted(i for fold in folds for i in fold.members) == [0, 1, 2]


@given(st.lists(st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10"]), min_size=1, max_size=4), max_size=20))
def test_unfolding_gives_every_name_once(parts):
    names = list(dict.fromkeys(".".join(p) for p in parts))
    folds = fold_names([(name, None) for name in names])
    assert sorted(name for fold in folds for name in unfold_name(fold.pattern)) == sorted(names)
    assert sorted(i for fold in folds for i in fold.members) == list(range(len(names)))


def test_marks_find_whole_paths_only():
    text = "a.1.b meets a.1.c, not a.10.b, x.a.1.b or a.1x"
    marked = mark(text, "a.1.b")
    assert unmark(marked, "a.{0..3}.b") == "a.{0..3}.b meets a.{0..3}.c, not a.10.b, x.a.1.b or a.1x"
    assert unmark(marked, "a.1.b") == text


def test_rows_fold_only_if_reasons_agree():
    rows = [row("l.0.w", (4, 4), reason="x"), row("l.1.w", (4, 4), reason="y"), row("l.2.w", (4, 4), reason="x")]
    assert [(r.name, n) for r, n in fold_rows(rows)] == [("l.{0,2}.w", 2), ("l.1.w", 1)]


def test_reasons_that_name_their_own_layer_fold():
    folded = {r.name: r.reason for r, _ in fold_rows(llama_like().parameters)}
    assert len(folded) == 9
    name = "model.layers.{0..31}.mlp.down_proj.weight"
    assert folded[name] == "closes the cut of model.layers.{0..31}.mlp.up_proj"


# Files


@pytest.mark.parametrize("plan", [llama_like(), llama_like(tied=False), mlp(), make_plan([])])
def test_a_saved_plan_loads_equal(plan, tmp_path):
    path = tmp_path / "plan.toml"
    plan.save(path, command="autotp plan x --tp 2\nsecond line")
    assert Plan.load(path) == plan
    assert path.read_text().startswith("# autotp plan x --tp 2\n# second line\n")


def test_saving_is_folded_and_the_same_every_time():
    text = plans_io.dumps(llama_like())
    assert 'name = "model.layers.{0..31}.mlp.up_proj.weight"' in text
    assert "unfolded" not in text
    assert text == plans_io.dumps(llama_like())
    assert len(text) < 5000


def test_an_order_that_folding_would_lose_is_written_row_by_row():
    plan = llama_like(layers=3)
    mixed = replace(plan, parameters=tuple(reversed(plan.parameters)))
    text = plans_io.dumps(mixed)
    assert 'unfolded = ["parameters"]' in text
    assert plans_io.loads(text) == mixed
    backwards = replace(plan, collectives=tuple(reversed(plan.collectives)))
    text = plans_io.dumps(backwards)
    assert 'unfolded = ["collectives"]' in text
    assert plans_io.loads(text) == backwards


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_names = st.lists(st.one_of(st.sampled_from(["a", "0", "1", "{0..3}", "b"]), _texts), min_size=1, max_size=3).map(
    ".".join
)


@settings(max_examples=200)
@given(st.lists(st.tuples(_names, _texts), max_size=6, unique_by=lambda pair: pair[0]), _texts)
def test_any_text_survives(pairs, text):
    rows = [row(name, (4, 2), "colwise", 0, reason=reason) for name, reason in pairs]
    calls = [Collective(module=name, kind="all_reduce", when="forward", bytes=8) for name, _ in pairs]
    findings = [Finding(code="X", level="note", where=text, message=text)]
    plan = make_plan(rows, collectives=calls, findings=findings, model=text)
    assert plans_io.loads(plans_io.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("schema = 1", "schema = 9"), "schema is 9, this version reads 1"),
        (('style = "colwise"', 'style = "colwize"'), "unknown style 'colwize'. Did you mean: colwise"),
        (('model = "mlp"\n', ""), "not a plan: 'model' is missing"),
        (("[mesh]", "[mesh"), "not TOML"),
        (("dim = 0", "dimension = 0"), "not a plan"),
    ],
)
def test_a_broken_file_is_told_with_its_name(change, told, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text(plans_io.dumps(mlp()).replace(*change))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert told in str(caught.value) and "broken.toml" in str(caught.value)


def test_a_missing_or_binary_file_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file"):
        Plan.load(tmp_path / "b.toml")


# Plain data


def test_the_keys_of_the_contract():
    data = json.loads(json.dumps(llama_like().to_dict()))
    assert data["schema"] == 1
    assert {"model", "mesh", "parameters", "collectives", "memory", "findings"} <= data.keys()
    assert {"name", "shape", "local_shape", "style", "dim", "reason"} <= data["parameters"][0].keys()
    assert data["collectives"][0].keys() == {"module", "kind", "pass", "bytes"}
    names = [entry["name"] for entry in data["parameters"]]
    assert len(names) == len(set(names)) == len(llama_like().parameters)


# Exports


def test_tp_plan_is_keyed_as_in_transformers():
    assert llama_like(tied=False).to_tp_plan() == {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }


def test_tp_plan_of_raw_parameters_and_biases():
    rows = [
        row("l.0.experts.gate_up", (4, 8, 8), "packed_colwise", 2),
        row("l.0.fc.weight", (8, 8), "colwise", 0),
        row("l.0.fc.bias", (8,), "colwise", 0),
        row("l.0.out.weight", (8, 8), "rowwise", 1),
        row("l.0.out.bias", (8,)),
        row("l.0.odd.weight", (8, 8)),
        row("l.0.odd.bias", (8,), "colwise", 0),
    ]
    assert make_plan(rows).to_tp_plan() == {
        "l.*.experts.gate_up": "packed_colwise",
        "l.*.fc": "colwise",
        "l.*.out": "rowwise",
        "l.*.odd.bias": "colwise",
    }


def test_tp_plan_names_what_transformers_cannot_express():
    rows = [
        row("l.0.fc.weight", (8, 8), "colwise", 0),
        row("l.1.fc.weight", (8, 8)),
        row("l.0.qkv.weight", (8, 8), "packed_colwise_gather_output", 0),
    ]
    with pytest.raises(PlanError) as caught:
        make_plan(rows).to_tp_plan()
    assert "l.0.fc: other layers have another style" in str(caught.value)
    assert "l.0.qkv (packed_colwise_gather_output): no such style there" in str(caught.value)
    assert caught.value.code == "TP-EXPORT"


def test_every_style_of_ours_is_known_to_transformers_but_one():
    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    from autotp.exports import _NOT_IN_TRANSFORMERS
    from autotp.plan_types import STYLES

    ours = _NOT_IN_TRANSFORMERS | {"gathered_at_use"}  # whole there
    assert {style for style in STYLES if style not in parallel.ALL_PARALLEL_STYLES} == ours


def test_to_python_is_a_program_with_stock_styles():
    text = llama_like(tied=False).to_python()
    ast.parse(text)
    space = {}
    exec(text, space)
    styles = {key: type(style).__name__ for key, style in space["styles"]().items()}
    assert styles["model.layers.*.self_attn.q_proj"] == "ColwiseParallel"
    assert styles["model.layers.*.mlp.down_proj"] == "RowwiseParallel"
    assert styles["model.embed_tokens"] == "RowwiseParallel"


def test_to_python_lists_layers_that_differ_one_by_one():
    rows = [
        row(f"l.{i}.fc.weight", (8, 8), style, dim)
        for i, (style, dim) in enumerate([("colwise", 0), ("replicate", None), ("rowwise_split_input", 1)])
    ]
    text = make_plan(rows, model='a"""b\\').to_python()
    ast.parse(text)
    assert '"l.0.fc": ColwiseParallel()' in text
    assert '"l.2.fc": RowwiseParallel(input_layouts=Replicate())' in text
    assert "*.fc" not in text and "l.1" not in text


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row("qkv.weight", (12, 8), "packed_colwise", 0)], "qkv.weight (packed_colwise): no stock style"),
        ([row("n.weight", (8,), "replicated_with_grad_allreduce")], "no stock style"),
        ([row("fc.weight", (8, 8), "colwise", 1)], "stock cuts dim 0 of a matrix, this is dim 1 of 2"),
        ([row("conv.weight", (8, 8, 3, 3), "colwise", 0)], "this is dim 0 of 4"),
        ([row("w1", (8, 8), "colwise", 0)], "not the weight or bias"),
        ([replace(row("fc.weight", (8, 8), "colwise", 0), local_shape=(5, 8))], "8 is not in 2 equal parts of 5"),
        ([row(f"l.{i}.w1", (8, 8), "colwise", 0) for i in range(3)], "l.{0..2}.w1 (colwise)"),
    ],
)
def test_to_python_names_what_stock_torch_cannot_express(rows, told):
    with pytest.raises(PlanError) as caught:
        make_plan(rows).to_python()
    assert told in str(caught.value) and "autotp.shard(model, mesh)" in str(caught.value)


def test_to_python_keeps_ties_and_sequence_parallel_out():
    with pytest.raises(PlanError, match="tied to model"):
        llama_like().to_python()
    with pytest.raises(PlanError, match="sequence_parallel"):
        replace(mlp(), sequence_parallel=True).to_python()


# Differences


def test_diff_folds_and_is_empty_for_equal_plans():
    plan, other = llama_like(), llama_like()
    assert plan.diff(other) == ""
    whole = tuple(
        row(r.name, r.shape, reason="user") if "up_proj" in r.name else r
        for r in other.parameters
        if "norm" not in r.name
    )
    lines = plan.diff(replace(other, parameters=whole, mesh={"tp": 2, "dp": 4})).splitlines()
    assert lines == [
        "mesh: tp=2 -> tp=2, dp=4",
        "model.layers.{0..31}.mlp.up_proj.weight: colwise dim 0 256x64 as 128x64 -> replicate 256x64 as 256x64",
        "model.layers.{0..31}.norm.weight: replicate 64 as 64 -> (no such parameter)",
    ]
    assert "bytes per rank: " in plan.diff(llama_like(tp=4))
