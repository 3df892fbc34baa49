"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """CUDA for tests marked gpu, the CPU for all others."""
    if request.node.get_closest_marker("gpu") is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


def pytest_configure(config: pytest.Config) -> None:
    # Workers that each use every core would spend their time waiting for each other.
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
