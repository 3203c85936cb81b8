"""Imports go downward only, and `import autotp` is light. Each check has a test that it can fail."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "autotp"

# Lowest first. Modules that are not named here are helpers: they may stand anywhere, as long as
# nothing reaches upwards through them.
LAYERS = (
    "errors",
    "plan_types",
    "foreign",
    "mesh",
    "torch_compat",
    "layouts",
    "inputs",
    "models",
    "trace",
    "ownership",
    "program",
    "foreign_proof",
    "planning",
    "plans_io",
    "styles",
    "generation",
    "sharding",
    "verification",
    "shipped",
    "display",
    "commands",
    "cli",
)

# Methods that users expect on a plan or a report, handed to the module that does the work.
HANDED_UP = {
    ("plan_types", "lookup"),
    ("plan_types", "plans_io"),
    ("plan_types", "exports"),
    ("plan_types", "display"),
    ("verification", "display"),
}
LIGHT = (
    "errors",
    "plan_types",
    "folding",
    "lookup",
    "plans_io",
    "exports",
    "foreign",
    "shipped",
    "display",
    "commands",
    "cli",
)


def read_edges(package):
    """(importer, imported) by top-level module; packages count as one, `__init__` is left out (it is lazy)."""
    edges = set()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for target in imported(ast.parse(path.read_text(encoding="utf-8")), parts):
            if target and target != parts[0]:
                edges.add((parts[0], target))
    return edges


def imported(tree, parts):
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("autotp."))
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [*("autotp", *parts)[: len(parts) + 1 - node.level], *base]
            if base[:1] == ["autotp"]:
                yield from base[1:2] or [name.name for name in node.names if not name.name.startswith("__")]


def reach(edges, start):
    found, waiting = set(), [start]
    while waiting:
        here = waiting.pop()
        for target in {b for a, b in edges if a == here} - found:
            found.add(target)
            waiting.append(target)
    return found


def violations(edges):
    edges = edges - HANDED_UP
    modules = {name for edge in edges for name in edge}
    problems = [f"{name} imports itself by way of others" for name in sorted(modules) if name in reach(edges, name)]
    for height, layer in enumerate(LAYERS):
        problems += [f"{layer} reaches up to {other}" for other in LAYERS[height + 1 :] if other in reach(edges, layer)]
    return problems


def test_imports_go_downward_only():
    assert violations(read_edges(PACKAGE)) == []


@pytest.mark.parametrize(
    ("edges", "problem"),
    [
        ({("errors", "plan_types")}, "errors reaches up to plan_types"),
        ({("trace", "helper"), ("helper", "planning")}, "trace reaches up to planning"),
        ({("a", "b"), ("b", "a")}, "a imports itself by way of others"),
        ({("mesh", "cli")}, "mesh reaches up to cli"),
    ],
)
def test_the_layer_check_can_fail(edges, problem):
    assert problem in violations(edges)


def test_all_ways_to_import_are_seen(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("import autotp.b\nfrom autotp import c\nfrom .d import x\nfrom . import e\n")
    (tmp_path / "sub" / "f.py").write_text(
        "from ..g import x\nfrom .own import y\ndef h():\n    from autotp.i import z\n"
    )
    (tmp_path / "k.py").write_text("if TYPE_CHECKING:\n    from autotp.l import x\nfrom autotp import __version__\n")
    assert read_edges(tmp_path) == {("a", "b"), ("a", "c"), ("a", "d"), ("a", "e"), ("sub", "g"), ("sub", "i")}


def test_every_layer_exists():
    found = {path.stem if path.suffix else path.name for path in PACKAGE.iterdir()}
    assert set(LAYERS) <= found


def loaded_by(program, names):
    check = f"{program}\nimport sys\nprint([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout)


def test_import_autotp_loads_nothing_heavy():
    assert loaded_by("import autotp", ("torch", "numpy", "rich", "typer", "transformers")) == []


def test_modules_of_text_load_no_torch():
    program = "\n".join(f"import autotp.{name}" for name in LIGHT) + "\nautotp.Plan, autotp.AutotpError"
    assert loaded_by(program, ("torch", "numpy")) == []


def test_the_import_check_can_fail():
    assert loaded_by("import autotp; autotp.plan_types = __import__('numpy')", ("torch", "numpy")) == ["numpy"]


@pytest.mark.parametrize(("library", "home"), [("rich", "display"), ("typer", "cli")])
def test_libraries_stay_behind_their_door(library, home):
    users = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] == library for name in names):
                users.add(path.relative_to(PACKAGE).with_suffix("").parts[0])
    assert users == {home}
