"""Counters of one process, left in memory where another process reads them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from hotexperts.plain_file import plain

Counters = dict[str, dict[str, int]]  # layer: counter: value


def _folder() -> Path:
    """Shared memory, which no disk sees, where the system has it."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def counter_file(instance: str, rank: int) -> Path:
    """Where a rank of an engine instance leaves its counters."""
    return _folder() / f"hotexperts-{instance}-{rank}.json"


def write_counters(path: Path, counters: Counters) -> None:
    """Replace the file at once, so that nobody reads half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(counters))
    fresh.replace(path)


def read_counters(instance: str) -> dict[int, Counters]:
    """Counters by rank; a rank that has written nothing yet is left out."""
    prefix = f"hotexperts-{instance}-"
    found = {}
    for path in _folder().glob(f"{prefix}*.json"):
        rank = path.stem.removeprefix(prefix)
        try:
            found[int(rank)] = json.loads(plain(path).read_text())
        except (OSError, ValueError):
            continue  # its process has ended, or the file is not ours
    return dict(sorted(found.items()))


def total(counters: Counters) -> dict[str, int]:
    """Each counter's sum over the layers."""
    sums: dict[str, int] = {}
    for layer in counters.values():
        for name, value in layer.items():
            sums[name] = sums.get(name, 0) + value
    return sums
