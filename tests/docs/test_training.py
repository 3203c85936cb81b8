"""The training script of docs/train_2d.md: run, ended, and started again, it goes on as if it had not been."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.test_readme import ROOT, blocks, environment

pytestmark = pytest.mark.slow
SCRIPT, PIPELINE = (
    body for mark, _, body in blocks((ROOT / "docs" / "train_2d.md").read_text()) if mark == "run with torchrun"
)


def train(folder, ranks, steps):
    """The lines that it prints."""
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "script.py"]
    env = {**environment(), "STEPS": "6", "RUN_FOLDER": str(folder / "run"), "CUDA_VISIBLE_DEVICES": ""}
    script = SCRIPT.replace("range(start, STEPS)", f"range(start, {steps})")
    if steps < 6:  # ended after some steps: no last checkpoint
        script = script.partition("autotp.save(model, FOLDER, optimizer")[0]
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.long
def test_a_pipeline_learns(tmp_path):
    (tmp_path / "script.py").write_text(PIPELINE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "script.py"]
    env = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert sorted(path.name for path in (tmp_path / "stages").iterdir()) == ["0", "1"]


def test_it_goes_on_on_other_ranks(tmp_path):
    first = train(tmp_path, 4, 5)  # the checkpoint is of three steps
    assert [line.split()[1] for line in first] == ["0", "1", "2", "3", "4"]
    second = train(tmp_path, 2, 6)  # dp=1
    assert [line.split()[1] for line in second] == ["3", "4", "5"]
    again = {line.split()[1]: float(line.split()[3]) for line in second}
    for line in first[3:]:
        assert again[line.split()[1]] == pytest.approx(float(line.split()[3]), abs=2e-5)
