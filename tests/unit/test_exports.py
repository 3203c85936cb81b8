import pickle
import pkgutil
import subprocess
import sys

import pytest

import autotp

PUBLIC = [
    "AutotpError",
    "BuildError",
    "CheckpointError",
    "Collective",
    "Finding",
    "InputError",
    "Memory",
    "MeshError",
    "OpView",
    "Plan",
    "PlanError",
    "ProofError",
    "RankLostError",
    "Report",
    "Row",
    "RuleError",
    "Saving",
    "SpecError",
    "StrictError",
    "VerifyError",
    "WeightsError",
    "__version__",
    "check_inputs",
    "export",
    "load",
    "materialize",
    "on_meta",
    "plan",
    "register_rule",
    "resume",
    "roll_call",
    "save",
    "shard",
    "verify",
]


def test_the_public_names_are_these():
    assert sorted(autotp.__all__) == PUBLIC == sorted(set(autotp.__all__))
    assert sorted(dir(autotp)) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name):
    assert getattr(autotp, name) is not None


def test_lazy_homes_and_all_agree():
    assert {*autotp._HOMES, "__version__"} == set(autotp.__all__)


def test_no_submodule_hides_a_public_function():
    submodules = {module.name for module in pkgutil.iter_modules(autotp.__path__)}
    assert not submodules & set(autotp.__all__)
    assert callable(autotp.plan) and callable(autotp.shard) and callable(autotp.verify)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        autotp.nothing  # noqa: B018


def test_errors_keep_their_code_through_pickle():
    error = autotp.PlanError("text", code="TP-X")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code) == ("text", "TP-X")
    assert autotp.PlanError("text").code == "TP-PLAN"


def test_star_import_and_type_marker():
    done = subprocess.run([sys.executable, "-c", "from autotp import *; plan, shard, verify"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert any(module.name for module in pkgutil.iter_modules(autotp.__path__))
    from importlib.resources import files

    assert files("autotp").joinpath("py.typed").is_file()
