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
    # Small tensors: threads that wait for each other cost more than they bring.
    torch.set_num_threads(1)
