"""K51 and K52: rules that match nothing or twice, and plans in which nothing is cut, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.proj(torch.relu(self.fc(x)))

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale

class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 16))

    def forward(self, x):
        return torch.fft.fft(x * self.w).real

def make():
    return Layers(), torch.zeros(3, 16)

def opaque():
    return Opaque(), torch.zeros(3, 16)
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`autotp ...` in a folder that holds the model."""
    (folder / "model.py").write_text(MODEL)
    line = [sys.executable, "-m", "autotp", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=240, check=False, env=env)


def test_a_rule_that_matches_nothing_shows_the_nearest_names(tmp_path: Path) -> None:
    done = command(tmp_path, "plan", "model.py:make", "--tp", "2", "--set", "layerz.*.fc=colwise")
    assert done.returncode == 2
    assert "layers.0.fc" in done.stderr
    assert not done.stdout


def test_overlapping_rules_are_settled_and_shown(tmp_path: Path) -> None:
    rules = ("--set", "*.fc=colwise", "--set", "layers.0.fc=replicate")
    done = command(tmp_path, "plan", "model.py:make", "--tp", "2", *rules, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    styles = {row["name"]: row["style"] for row in told["parameters"]}
    assert styles["layers.0.fc.weight"] == "replicate"
    assert styles["layers.1.fc.weight"].startswith("colwise")
    assert any("both match; the later one counts" in finding["message"] for finding in told["findings"])


def test_every_parameter_is_listed_once_and_every_run_says_the_same(tmp_path: Path) -> None:
    runs = [command(tmp_path, "plan", "model.py:make", "--tp", "2", "--json") for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    rows = json.loads(runs[0].stdout)["parameters"]
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) == 8
    assert all(row["reason"] and row["local_shape"] for row in rows)


def test_nothing_cut_is_said_and_refused_under_strict(tmp_path: Path) -> None:
    done = command(tmp_path, "plan", "model.py:opaque", "--tp", "2")
    assert done.returncode == 0
    assert "0.0 % of the bytes of weight matrices" in done.stdout
    assert "is combined with a whole activation" in done.stdout, "the reason is missing"
    assert command(tmp_path, "plan", "model.py:opaque", "--tp", "2", "--strict").returncode == 1
