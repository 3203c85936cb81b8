"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from autotp.ranks import RankPool

# How long an example takes says nothing here: other processes compute beside it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

POOL_SIZE = 4
TASK_SECONDS = 150.0
IMPORTS = ("autotp.sharding", "transformers.modeling_utils", "torchvision", "timm", "tests.harness.tasks")


def pytest_configure(config: pytest.Config) -> None:
    """The marker by which a short run leaves out what takes long: `pytest -m "not long"`."""
    config.addinivalue_line("markers", "long: not in the short run")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks that live as long as the test session; started at the first use."""
    with RankPool(POOL_SIZE, timeout=TASK_SECONDS, imports=IMPORTS) as pool:
        yield pool
