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

PLAN_LOADS = 3  # of four bytes, that are not of rows
PROGRAM = Path(__file__).with_name("compiling.py")


def compiled(name: str, policy: str, packing: str, capability: int) -> dict[str, int]:
    """Loads and stores of a kernel by their kind."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    case = json.dumps([name, policy, packing, capability])
    command = [sys.executable, str(PROGRAM), case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts, num_bytes = json.loads(done.stdout)
    assert num_bytes > 1000
    return counts


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("packing", ["plain", "packed12"])
def test_banks_are_filled_sixteen_bytes_at_a_time(packing: str, capability: int) -> None:
    """A block of a plain tensor is four loads and stores a thread, of a packed one three and four;
    then come its exceptions."""
    counts = compiled("fill", "lru", packing, capability)
    loads, stores = counts["ld.global.v4.b32"], counts["st.global.v4.b32"]
    plain, packs = 4096 // 256 // 4, packing == "packed12"
    assert (loads, stores) == ((3 + plain, 4 + plain) if packs else (2 * plain, 2 * plain))
    assert counts.get("st.global.b16", 0) == (1 if packs else 0)


@pytest.mark.parametrize(
    ("packing", "capability", "num_stores", "kind", "num_scale_loads"),
    [
        ("int8", 80, 2, "ld.global.b16", 2),
        ("fp8", 90, 2, "ld.global.b32", 2 + PLAN_LOADS),
        ("int4", 80, 4, "ld.global.b16", 4),
        ("mxfp4", 90, 4, "ld.global.v2.b32", 2),  # of columns, which a group's rows share
        ("gptq", 80, 4, "ld.global.b16", 4),
        ("awq", 90, 4, "ld.global.b32", 4 + PLAN_LOADS),  # a scale and its zero point in one
    ],
)
def test_codes_are_one_load_and_scales_few(
    packing: str, capability: int, num_stores: int, kind: str, num_scale_loads: int
) -> None:
    """A tile is sixteen bytes of codes a thread, which make two or four times as many; the other
    tensor is plain."""
    counts, plain = compiled("fill", "lru", packing, capability), 4096 // 256 // 4
    assert counts["ld.global.v4.b32"] == 1 + plain
    assert counts["st.global.v4.b32"] == num_stores + plain
    assert counts[kind] == num_scale_loads


@pytest.mark.parametrize(("policy", "packing"), [("lru", "packed12"), ("adv", "packed12")])
def test_plans_copy_sixteen_bytes_at_a_time(policy: str, packing: str) -> None:
    counts = compiled("plan", policy, packing, 90)
    assert counts["ld.global.v4.b32"] >= 3 + 4
    assert counts["st.global.v4.b32"] >= 4 + 4


def test_a_plan_takes_tiles_that_came_ahead() -> None:
    """The code is there for both: from the host and from the rows ahead."""
    counts = compiled("plan", "lru", "int4", 90)
    assert counts["ld.global.v4.b32"] >= 1 + 4 + 2 * 4
    assert counts["st.global.v4.b32"] >= 2 * (4 + 4)


def test_a_prefetch_looks_for_the_end_at_every_block() -> None:
    """By one thread for all, which else would disagree; and copies as the others do."""
    counts = compiled("prefetch", "lru", "packed12", 90)
    assert (counts["ld.global.v4.b32"], counts["st.global.v4.b32"]) == (3 + 4, 4 + 4)
    looks = sum(n for name, n in counts.items() if name.startswith("atom.") and ".or." in name)
    assert looks == 2, "after a block of each tensor"
