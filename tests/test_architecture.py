"""What may be imported where, and which names are public."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "triton",
    "safetensors",
    "accelerate",
    "matplotlib",
    "fastapi",
    "uvicorn",
)
HELP = """
from hotexperts.cli.main import main
for command in "run serve verify simulate trace doctor plan report bench top".split():
    assert main([command, "--help"]) == 0
assert main(["--help"]) == main(["--version"]) == 0
"""


def imported_heavies(code: str) -> list[str]:
    """The heavy packages that a fresh process has imported after `code`."""
    code += f"\nimport json, sys\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "code",
    [
        "import hotexperts",
        "import hotexperts.demo",
        "import hotexperts.bench.earlier, hotexperts.bench.routing, hotexperts.bench.shapes",
        "import hotexperts.page.of_trace",
        "import hotexperts.policy.adv",
        "import hotexperts.predict.combined",
        "import hotexperts.residency",
        "import hotexperts.simulate.sweep",
        "import hotexperts.sizing",
        pytest.param(HELP, id="help"),
    ],
)
def test_decisions_and_the_command_line_start_without_tensors(code: str) -> None:
    assert imported_heavies(code) == []


def test_the_cache_does_not_need_transformers() -> None:
    assert "transformers" not in imported_heavies("import hotexperts.cache")


def test_public_names() -> None:
    import hotexperts
    import hotexperts.cache

    assert hotexperts.__version__.count(".") == 2
    assert hotexperts.cache.__all__ == [
        "CPUBackingStore",
        "CachedWeightProvider",
        "DiskBackingStore",
        "ExpertCacheOverflow",
        "ExpertStore",
        "ExpertWeightProvider",
        "ExpertWeightResult",
        "FileStore",
        "FullGPUProvider",
        "GPUSlotManager",
        "StreamBanks",
    ]
