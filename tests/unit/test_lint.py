"""The checkers run as tests, so that one command covers everything."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=lambda words: "-".join(words[:2]),
)
def test_checker(words):
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"


def test_no_merge_was_left_half_done():
    folders = [ROOT / name for name in ("autotp", "docs", "notebooks", "plans", "tests")]
    kinds = {".md", ".py", ".toml", ".ipynb", ".sh"}
    texts = [*ROOT.glob("*.md"), *(p for f in folders for p in f.rglob("*") if p.suffix in kinds)]
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    found = [str(p.relative_to(ROOT)) for p in texts if any(x.startswith(marks) for x in p.read_text().splitlines())]
    assert len(texts) > 100 and not found


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import rich\n", "TID251"),
        ("import typer\n", "TID251"),
        ("def f(x): return x\n", "ANN001"),
        ("import os\n", "F401"),
    ],
)
def test_the_linter_can_fail(code, rule):
    words = ["ruff", "check", "--stdin-filename", "autotp/fake.py", "-"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, input=code, capture_output=True, text=True)
    assert done.returncode == 1 and rule in done.stdout
