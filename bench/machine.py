"""What a benchmark result must say of where it was measured, and how it is written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hotexperts.bench import machine as hot
from hotexperts.bench.machine import first_line, spread

__all__ = ["describe", "link_gb_s", "spread", "write"]
_LINK_NBYTES = 8 * 12_582_912  # experts of OLMoE-1B-7B in bf16


@cache
def describe() -> dict[str, Any]:
    """Machine, driver, versions and commit, as they were when first asked.

    Where the code lies outside of a git checkout, HOTEXPERTS_COMMIT names the commit; what else
    the host was doing is said by HOTEXPERTS_BESIDE.
    """
    commit = os.environ.get("HOTEXPERTS_COMMIT") or first_line(["git", "rev-parse", "HEAD"])
    found = hot.describe()
    beside = os.environ.get("HOTEXPERTS_BESIDE")
    more = {"beside": beside} if beside else {}
    return {"date": found.pop("date"), "commit": commit, **more, **found}


def link_gb_s() -> float:
    """GB/s of `copy_` of 8 experts to the GPU, from page-locked memory."""
    import torch

    from hotexperts.cache import link

    return link.link_gb_s(_LINK_NBYTES, torch.device("cuda"))


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
