"""`verify`: what it finds, what it leaves alone, and how it says it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.errors import AutotpError, MeshError, VerifyError
from autotp.ranks import RankPool
from autotp.verification import Report, verify_spec
from tests.exact.verify_tasks import OnlyFloat32
from tests.harness import standins

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_it_starts_ranks_of_its_own_and_leaves_the_model_alone() -> None:
    model, x = standins.build()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    report = autotp.verify(model, tp=2, sample=x)
    assert report.ok, str(report)
    assert report.forward_error < 1e-13
    assert report.max_gradient_error < 1e-13
    assert set(report.gradients) == set(before)
    assert report.first_bad is None
    assert report.cut_share == 1.0
    assert report.state and report.ranks_agree
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_inputs_are_inferred() -> None:
    report = autotp.verify(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4)), tp=2)
    assert report.ok, str(report)


def test_a_spec_is_built_on_the_ranks() -> None:
    report = verify_spec("tests.harness.standins:MLP", tp=2, dtype=torch.float32)
    assert report.ok, str(report)
    assert report.dtype == "float32"
    assert report.forward_limit == 1e-5


def test_forward_only() -> None:
    model, x = standins.build()
    report = autotp.verify(model, tp=2, sample=x, backward=False)
    assert report.ok
    assert not report.gradients


def test_a_model_that_needs_float32_gets_it_and_the_report_says_so() -> None:
    report = autotp.verify(OnlyFloat32(), tp=2, sample=torch.randn(3, 8))
    assert report.ok, str(report)
    assert report.dtype == "float32"
    assert [finding.code for finding in report.findings] == ["TP-FLOAT32"]


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch, autotp
        from torch import nn

        class Mine(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

            def forward(self, x):
                return self.down(torch.relu(self.up(x)))

        report = autotp.verify(Mine(), tp=2, sample=torch.randn(3, 8))
        print("verified", report.ok)
        """)
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.stdout.strip() == "verified True", done.stderr


def test_in_a_process_group(ranks: RankPool) -> None:
    for report, same in ranks.run("tests.exact.verify_tasks:in_group", {"tp": 4}, timeout=60):
        assert report.ok, str(report)
        assert report.tp == 4
        assert same


@pytest.mark.parametrize("apart", ["inputs", "weights"])
def test_ranks_with_different_data_are_told(ranks: RankPool, apart: str) -> None:
    with pytest.raises(VerifyError, match=f"{apart} differ between TP ranks 0 and 1"):
        ranks.run("tests.exact.verify_tasks:in_group", {"tp": 4, "apart": apart}, timeout=60)


@pytest.mark.parametrize(
    ("name", "first_bad", "text"),
    [
        ("scale_gradient_partial", "scale: its gradient differs", "scale"),
        ("norm_off", "norm: its output differs", "norm"),
        ("weights_changed", None, "head.bias: the gathered values are not the original ones"),
        ("ranks_differ", "head: its output differs", "only on rank 1"),
    ],
)
def test_what_is_wrong_is_reported(ranks: RankPool, name: str, first_bad: str | None, text: str) -> None:
    report: Report = ranks.run("tests.exact.verify_tasks:with_standin", name, timeout=60)[0]
    assert not report.ok
    assert report.first_bad is None if first_bad is None else str(report.first_bad).startswith(first_bad)
    assert "FAIL" in str(report)
    assert text in str(report)
    assert "FAIL" in report._repr_html_()
    assert "FAIL" in repr(report)
    assert pickle.loads(pickle.dumps(report)) == report


def test_mistakes_are_named() -> None:
    with pytest.raises(VerifyError, match="weight is on the meta device"):
        autotp.verify(nn.Linear(4, 4, device="meta"), tp=2)
    with pytest.raises(AutotpError, match="forward"):
        autotp.verify(nn.Linear(4, 4), tp=2, sample={"wrong": torch.ones(1)})
    with pytest.raises(VerifyError, match="does not run on this sample"):
        autotp.verify(nn.Linear(4, 4), tp=2, sample=torch.ones(1, 3))


def test_a_size_that_is_not_the_groups_is_refused(ranks: RankPool) -> None:
    with pytest.raises(MeshError, match="tp=3, but the process group has 4 ranks"):
        ranks.run(_ask_for_three, timeout=60)


def _ask_for_three(payload: object) -> None:
    model, x = standins.build()
    autotp.verify(model, tp=3, sample=x)
