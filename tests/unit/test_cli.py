import io
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
from golden import check_golden
from sample_plans import llama_like, make_plan, row
from test_display import make_report

from autotp import cli
from autotp.errors import AutotpError, InputError, RuleError, SpecError
from autotp.plan_types import Finding, Plan


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def fakes(monkeypatch):
    """Stand-ins for the modules that plan and verify; what they are called with is kept in `calls`."""
    state = SimpleNamespace(calls=[], plan=llama_like(), report=make_report(), error=None)

    def record(name, answer):
        def call(*args, **kwargs):
            state.calls.append((name, args, kwargs))
            if state.error:
                raise state.error
            return answer(*args, **kwargs)

        return call

    def planned(model, tp=None, *, mesh=None, sample=None, rules=None, sequence_parallel=False):
        rows = tuple(
            replace(r, style=rules[r.name], local_shape=r.shape, dim=None) if rules and r.name in rules else r
            for r in state.plan.parameters
        )
        return replace(state.plan, parameters=rows, mesh={"tp": tp or 2, **({"dp": 4} if mesh else {})})

    def loaded(spec):
        return SimpleNamespace(model=f"<{spec}>", sample=None, name=spec)

    contents = {
        "models": {"load_spec": record("load_spec", loaded)},
        "planning": {"plan": record("plan", planned)},
        "inputs": {"parse_sample": record("parse_sample", lambda text: ((text,), {}))},
        "verification": {"verify_spec": record("verify_spec", lambda *a, **k: state.report)},
        "demo": {"run": record("demo", lambda out, progress: 0)},
    }
    for name, members in contents.items():
        module = ModuleType(f"autotp.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"autotp.{name}", module)
    return state


@pytest.fixture
def run(fakes, capsys, monkeypatch):
    def run_words(*words):
        monkeypatch.setattr(sys, "argv", ["autotp", *words])
        capsys.readouterr()
        code = cli.run(list(words))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run_words


def called(fakes, name):
    return [(args, kwargs) for called_name, args, kwargs in fakes.calls if called_name == name]


# plan


def test_plan_prints_the_table_on_stdout_and_nothing_on_stderr(run):
    outcome = run("plan", "x.py:build", "--tp", "2")
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out == str(replace(llama_like(), model="x.py:build")) + "\n"


def test_plan_hands_every_option_on(run, fakes):
    words = ("--tp", "2", "--dp", "4", "--sp", "--sample", "s", "--set", "a=b.*=colwise", "--set", "c=replicate")
    run("plan", "x", *words)
    [(args, kwargs)] = called(fakes, "plan")
    assert args == ("<x>",)
    assert kwargs == {
        "mesh": "tp=2,dp=4",
        "sample": (("s",), {}),
        "rules": {"a=b.*": "colwise", "c": "replicate"},
        "sequence_parallel": True,
    }


def test_plan_json_is_one_document(run):
    outcome = run("plan", "x", "--tp", "2", "--json")
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.json["schema"] == 1 and outcome.json["mesh"] == {"tp": 2} and outcome.json["model"] == "x"
    assert len(outcome.json["parameters"]) == len(llama_like().parameters)


def test_plan_needs_a_number_of_ranks(run):
    outcome = run("plan", "x")
    assert outcome.code == 2 and outcome.out == ""
    assert outcome.err == "autotp: error: TP-USAGE: Missing option --tp: over how many ranks to cut, as --tp 8\n"


def test_save_notes_the_command_and_loads_again(run, fakes, tmp_path):
    path = tmp_path / "p.toml"
    outcome = run("plan", "x", "--tp", "2", "--save", str(path), "--set", "a.*=replicate")
    assert outcome.code == 0 and f"note: plan saved to {path}" in outcome.err
    first, *_ = path.read_text().splitlines()
    assert first == f"# autotp plan x --tp 2 --save {path} --set 'a.*=replicate'"
    assert Plan.load(path) == replace(fakes.plan, model="x")


def test_save_to_an_impossible_place_is_bad_input(run, tmp_path):
    outcome = run("plan", "x", "--tp", "2", "--save", str(tmp_path / "no" / "p.toml"))
    assert outcome.code == 2 and "cannot be written: No such file" in outcome.err


def test_a_saved_plan_gives_ranks_and_choices(run, fakes, tmp_path):
    path = tmp_path / "p.toml"
    name = "model.layers.0.mlp.up_proj.weight"
    chosen = tuple(row(r.name, r.shape, reason="user") if r.name == name else r for r in fakes.plan.parameters)
    replace(fakes.plan, parameters=chosen, model="x").save(path)
    outcome = run("plan", "x", "--plan", str(path))
    assert outcome.code == 0 and outcome.err == ""
    assert [kwargs["rules"] for _, kwargs in called(fakes, "plan")] == [None, {name: "replicate"}]
    assert called(fakes, "plan")[0][1]["tp"] == 2


def test_a_saved_plan_that_still_fits_is_planned_once(run, fakes, tmp_path):
    fakes.plan.save(tmp_path / "p.toml")
    assert run("plan", "x", "--plan", str(tmp_path / "p.toml")).err == ""
    assert len(called(fakes, "plan")) == 1


def test_a_stale_plan_is_told_and_one_of_another_model_refused(run, fakes, tmp_path):
    fakes.plan.save(tmp_path / "p.toml")
    outcome = run("plan", "x", "--tp", "2", "--dp", "4", "--plan", str(tmp_path / "p.toml"))
    assert outcome.code == 0 and "warning: this is not the plan of" in outcome.err
    assert "mesh: tp=2 -> tp=2, dp=4" in outcome.err
    make_plan([row("other.weight", (4, 4))]).save(tmp_path / "p.toml")
    outcome = run("plan", "x", "--plan", str(tmp_path / "p.toml"))
    assert outcome.code == 2 and "is a plan for another model" in outcome.err


def test_strict_exits_1_and_names_what_was_left_whole(run, fakes):
    outcome = run("plan", "x", "--tp", "2", "--strict")
    assert outcome.code == 1
    assert outcome.err.startswith("autotp: warning: TP-WHOLE model.layers.{0..31}.norm: ")
    assert outcome.out.startswith("Plan for x")
    fakes.plan = replace(fakes.plan, findings=(Finding(code="TP-WHOLE", level="note", where="a", message="small"),))
    assert run("plan", "x", "--tp", "2", "--strict").code == 0
    assert run("plan", "x", "--tp", "2").code == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layers.*", "write GLOB=STYLE"),
        ("=colwise", "write GLOB=STYLE"),
        ("a=colwize", "there is no style 'colwize'. Did you mean: colwise"),
        ("a=", "there is no style ''"),
    ],
)
def test_a_bad_rule_is_told(run, text, told):
    outcome = run("plan", "x", "--tp", "2", "--set", text)
    assert outcome.code == 2 and told in outcome.err and "TP-RULE" in outcome.err


# verify


def test_verify_prints_the_report_and_says_by_its_code_if_it_failed(run, fakes):
    outcome = run("verify", "x", "--tp", "4")
    assert (outcome.code, outcome.err) == (0, "") and outcome.out.startswith("Verify toy on tp=2 in float64: PASS")
    [(args, kwargs)] = called(fakes, "verify_spec")
    assert args == ("x",) and kwargs["tp"] == 4 and str(kwargs["dtype"]) == "torch.float64"
    assert kwargs["plan"] is kwargs["sample"] is kwargs["rules"] is None and kwargs["sequence_parallel"] is False
    fakes.report = make_report(ok=False, first_bad="l.1: output differs", forward_error=float("nan"))
    outcome = run("verify", "x", "--json")
    assert outcome.code == 1
    assert outcome.json["ok"] is False and outcome.json["forward_error"] == "nan"
    assert outcome.json["first_bad"] == "l.1: output differs"
    assert outcome.json["gradients"].keys() == fakes.report.gradients.keys() and outcome.json["state"] is True


def test_verify_takes_a_saved_plan(run, fakes, tmp_path):
    llama_like(tp=4).save(tmp_path / "p.toml")
    run("verify", "x", "--plan", str(tmp_path / "p.toml"))
    [(_, kwargs)] = called(fakes, "verify_spec")
    assert kwargs["plan"] == llama_like(tp=4) and kwargs["tp"] == 4


def test_verify_with_an_unknown_dtype(run):
    outcome = run("verify", "x", "--dtype", "int64")
    assert outcome.code == 2 and "no such floating point type" in outcome.err


# explain


def test_explain(run):
    outcome = run("explain", "x", "model.layers.0.mlp.down_proj", "--tp", "2")
    assert outcome.code == 0 and outcome.err == ""
    assert "why      closes the cut of model.layers.0.mlp.up_proj" in outcome.out
    data = run("explain", "x", "model.layers.0.mlp.down_proj", "--tp", "2", "--json").json
    assert data["parameter"]["style"] == "rowwise"
    assert [near["name"] for near in data["neighbours"]] == ["model.layers.0.mlp.up_proj.weight"]


def test_explain_of_an_unknown_name(run):
    outcome = run("explain", "x", "up_prj", "--tp", "2")
    assert outcome.code == 2 and outcome.out == ""
    assert "Did you mean: model.layers.0.mlp.up_proj.weight" in outcome.err


# demo and env


def test_demo_returns_its_code(run, fakes):
    assert run("demo").code == 0
    [(_, kwargs)] = called(fakes, "demo")
    assert kwargs == {"out": sys.stdout, "progress": sys.stderr} or set(kwargs) == {"out", "progress"}


def test_env_lists_versions_but_nothing_private(run):
    outcome = run("env")
    assert outcome.code == 0 and re.search(r"^torch +\d", outcome.out, re.M)
    data = run("env", "--json").json
    assert data["schema"] == 1 and {"autotp", "python", "torch", "devices", "backends"} <= data.keys()
    import platform

    assert platform.node() not in outcome.out and "/" not in outcome.out


# Failures


@pytest.mark.parametrize("error", [SpecError("no such file x"), InputError("no inputs"), RuleError("matches nothing")])
def test_a_mistake_of_the_user_is_a_line_and_exit_2(run, fakes, error):
    fakes.error = error
    outcome = run("plan", "x", "--tp", "2")
    assert outcome == Outcome(2, "", f"autotp: error: {error.code}: {error}\n")
    outcome = run("plan", "x", "--tp", "2", "--json")
    assert outcome.json == {"schema": 1, "error": {"code": error.code, "message": str(error)}}
    assert outcome.code == 2
    assert "Traceback" in run("plan", "x", "--tp", "2", "--debug").err


@pytest.mark.parametrize(
    "command", [("plan", "x", "--tp", "2"), ("verify", "x"), ("explain", "x", "y", "--tp", "2"), ("demo",)]
)
def test_a_fault_of_ours_is_exit_3(run, fakes, command):
    fakes.error = ZeroDivisionError("division by zero")
    outcome = run(*command)
    assert outcome.code == 3 and outcome.out == "" and "Traceback" not in outcome.err
    assert "TP-INTERNAL: ZeroDivisionError: division by zero. This is a fault of autotp, not yours" in outcome.err
    assert "--debug shows where" in outcome.err
    assert "Traceback" in run(*command, "--debug").err
    if command[0] != "demo":
        assert run(*command, "--json").json["error"]["code"] == "TP-INTERNAL"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plam", "x"), "Did you mean 'plan'?"),
        (("plan",), "Missing argument 'MODEL'"),
        (("plan", "x", "--tp", "0"), "--tp"),
        (("plan", "x", "--tp", "two"), "--tp"),
        (("plan", "x", "--nope"), "No such option: --nope"),
        (("explain", "x", "--tp", "2"), "Missing argument 'PARAMETER'"),
    ],
)
def test_bad_usage_is_exit_2_and_shows_the_usage(run, words, told):
    outcome = run(*words)
    assert outcome.code == 2 and outcome.out == ""
    assert told in outcome.err and "Usage: autotp" in outcome.err and "Traceback" not in outcome.err
    assert run(*words, "--json").json["error"]["code"] == "TP-USAGE"


def test_an_interrupt_is_quiet(run, fakes):
    fakes.error = KeyboardInterrupt()
    outcome = run("plan", "x", "--tp", "2")
    assert outcome.code == 130 and "Traceback" not in outcome.err


def test_a_reader_that_leaves_early_is_no_error(monkeypatch, fakes):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert cli.run(["plan", "x", "--tp", "2"]) == 0


def test_errors_derive_from_one(run):
    from autotp import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, AutotpError) and issubclass(kind, ValueError) for kind in kinds)
    codes = [kind.default_code for kind in kinds]
    assert len(set(codes)) == len(codes) and all(code.startswith("TP-") for code in codes)


# Help


@pytest.mark.parametrize("command", ["", "plan", "verify", "explain", "demo", "env"])
def test_help(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run(*command.split(), "--help")
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out.count("\n    autotp ") == 2, "two examples"
    assert "Exit codes: 0 fine, 1 findings, 2 bad usage or bad input, 3 our fault." in outcome.out
    check_golden(f"help_{command or 'autotp'}.txt", outcome.out)


def test_no_words_show_the_help(run):
    assert run().out == run("--help").out


def test_version(run):
    import autotp

    assert run("--version").out == f"autotp {autotp.__version__}\n"


def test_help_is_quick_and_imports_nothing_heavy():
    program = (
        "import sys; from autotp.cli import run; code = run(['plan', '--help']); "
        "heavy = [name for name in ('torch', 'numpy', 'rich', 'transformers') if name in sys.modules]; "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5
