"""Where an experiment ran."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import flexsparse


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, the processor and the device, as plain values."""
    found: dict[str, Any] = {
        "flexsparse": flexsparse.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        box = torch.cuda.get_device_properties(device)
        found["gpu"] = box.name
        found["gpu_memory_bytes"] = box.total_memory
        found["cuda"] = torch.version.cuda
        found["capability"] = f"{box.major}.{box.minor}"
    return found


def _cpu() -> str:
    """The processor's model; Python itself does not know it on Linux."""
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
