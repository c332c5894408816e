"""What a benchmark result must say of where it was measured, and how it is written."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@cache
def describe() -> dict[str, Any]:
    """Machine, driver, versions and commit, as they were when first asked.

    Where the code lies outside of a git checkout, HOTEXPERTS_COMMIT names the commit.
    """
    import torch

    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "versions": {name: _version(name) for name in ("torch", "triton", "transformers", "vllm")},
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _first_line(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write(path: Path, name: str, results: dict[str, Any]) -> None:
    """Write one result file, whole or not at all: the machine, the command, and the figures."""
    command = " ".join(
        ["python", f"bench/{name.replace('-', '_')}.py", *_without_paths(sys.argv[1:])]
    )
    content = {"benchmark": name, "command": command, "machine": describe(), **results}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def _without_paths(arguments: Sequence[str]) -> list[str]:
    """Where results and traces lie differs from machine to machine."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in ("--out", "--traces"):
            kept.append(argument)
        skip = argument in ("--out", "--traces")
    return kept


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    return os.environ.get("HOTEXPERTS_COMMIT") or _first_line(["git", "rev-parse", "HEAD"])


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0]
