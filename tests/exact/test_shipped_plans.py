"""The plan files in `plans/`: each is what the tool makes today, by the command in its header."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotp.models import load_spec
from autotp.plan_types import Plan
from autotp.planning import plan

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "plans"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda p: p.stem)
def test_is_what_the_tool_makes(path: Path) -> None:
    saved = Plan.load(path)
    made = plan(load_spec(f"torchvision:{path.stem}").model, saved.tp)
    assert saved.parameters == made.parameters, saved.diff(made)
    assert saved.collectives == made.collectives
    assert saved.cut_share > 0.99
