"""Kernels become code for GPUs on a machine that has none, with the loads and stores that we want.

In a process of its own: where Triton interprets, it does not compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("compiling.py")


def compiled(name: str, policy: str, *, packs: bool, capability: int) -> dict[str, int]:
    """Loads and stores of a kernel by their kind."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    case = json.dumps([name, policy, packs, capability])
    command = [sys.executable, str(PROGRAM), case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts, num_bytes = json.loads(done.stdout)
    assert num_bytes > 1000
    return counts


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("packs", [False, True])
def test_banks_are_filled_sixteen_bytes_at_a_time(packs: bool, capability: int) -> None:
    """A block of a plain tensor is four loads and stores a thread, of a packed one three and four;
    then come its exceptions."""
    counts = compiled("fill", "lru", packs=packs, capability=capability)
    loads, stores = counts["ld.global.v4.b32"], counts["st.global.v4.b32"]
    plain = 4096 // 256 // 4
    assert (loads, stores) == ((3 + plain, 4 + plain) if packs else (2 * plain, 2 * plain))
    assert counts.get("st.global.b16", 0) == (1 if packs else 0)


@pytest.mark.parametrize("policy", ["lru", "adv"])
def test_plans_copy_sixteen_bytes_at_a_time(policy: str) -> None:
    counts = compiled("plan", policy, packs=True, capability=90)
    assert counts["ld.global.v4.b32"] >= 3 + 4
    assert counts["st.global.v4.b32"] >= 4 + 4


def test_a_prefetch_looks_for_the_end_at_every_block() -> None:
    """By one thread for all, which else would disagree; and copies as the others do."""
    counts = compiled("prefetch", "lru", packs=True, capability=90)
    assert (counts["ld.global.v4.b32"], counts["st.global.v4.b32"]) == (3 + 4, 4 + 4)
    looks = sum(n for name, n in counts.items() if name.startswith("atom.") and ".or." in name)
    assert looks == 3  # at the start, and after a block of each tensor
