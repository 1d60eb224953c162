"""What several test modules share."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """One Ray cluster for all tests that want one: it takes 4 to 6 s to start."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tramontane[ray]'")
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(params=["thread", "ray"])
def placement(request: pytest.FixtureRequest) -> str:
    """Each kind of placement in turn."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return str(request.param)
