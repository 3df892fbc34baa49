"""Lint, format and types, as one runs them by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_clean(name: str) -> None:
    if name == "mypy" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("types are held against those that torch says of itself since 2.13")
    done = subprocess.run(
        [sys.executable, "-m", *COMMANDS[name]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
