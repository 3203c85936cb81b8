"""The documents are programs: their Python runs, their commands run, and the output shown is the real one.

A comment line before a fenced block says what is done with it: `run`, `prints` (what the block before printed) or
`run with torchrun`. A console block that begins with `$ autotp` is run and compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotp import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)```\n", re.S)
PLAIN = re.compile(r"`[^`]*`|\[[^]]*\]\(([^)]*)\)")


def blocks(text):
    return [(found["mark"] or "", found["language"], found["body"]) for found in FENCED.finditer(text)]


def captured(action):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        action()
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def mismatches(text):
    """Run everything that is marked, in order; (shown, real) wherever they differ."""
    found, names, printed = [], {"__name__": "document"}, ""
    for mark, language, body in blocks(text):
        if mark == "run":
            code = compile(body, "document", "exec")
            printed = captured(lambda code=code: exec(code, names))
        elif mark == "prints":
            found += [(body, printed)] if body != printed else []
        elif language == "console" and body.startswith("$ autotp "):
            command, _, shown = body.partition("\n")
            real = captured(lambda command=command: cli.run(shlex.split(command)[2:]))
            found += [(shown, real)] if shown != real else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_shows_is_what_happens(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert mismatches(path.read_text(encoding="utf-8")) == []


SCRIPTS = [body for mark, _, body in blocks((ROOT / "README.md").read_text()) if mark == "run with torchrun"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.split()[1].strip(":"))
def test_the_scripts_run(tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def environment():
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def test_the_readme_has_the_two_commands_that_set_up_and_go():
    plain = [body for _, language, body in blocks((ROOT / "README.md").read_text()) if not language]
    commands = [line for body in plain for line in body.splitlines() if line.startswith("python3 -m venv")]
    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/autotp demo",
        "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/python -m pytest",
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = [link for link in PLAIN.findall(path.read_text(encoding="utf-8")) if link and "://" not in link]
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []


def test_a_wrong_output_shows():
    text = "<!-- run -->\n```python\nprint(1 + 1)\n```\n\n<!-- prints -->\n```text\n3\n```\n"
    assert mismatches(text) == [("3\n", "2\n")]
    assert mismatches(text.replace("3\n", "2\n")) == []
    assert len(mismatches("```console\n$ autotp --version\nautotp 99\n```\n")) == 1


def test_a_block_that_is_not_marked_is_not_run():
    assert mismatches("```python\nraise ValueError\n```\n") == []
