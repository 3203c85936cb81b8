"""The task that measures one stand-in."""

from __future__ import annotations

from typing import Any

from autotp.measuring import Settings, measure
from tests.harness import standins
from tests.harness.tasks import mesh_of, summary


def run(name: str) -> dict[str, Any]:
    """Figures of one way to shard the MLP."""
    model, x = standins.build()
    figures = measure(model, ((x,), {}), mesh_of(2), getattr(standins, name), Settings())
    return summary(figures)
