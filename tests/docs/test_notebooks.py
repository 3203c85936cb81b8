"""Every notebook runs from a fresh kernel, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs.test_readme import ROOT, environment

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs(path, monkeypatch, tmp_path):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    nbclient.NotebookClient(
        read(path), timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()


@pytest.mark.slow
def test_a_failing_cell_shows(monkeypatch):
    failing = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert False")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(failing, timeout=60, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_valid_and_has_no_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
