"""How fast one core replays: demanded experts a minute, by policy and calls; needs no GPU.

    python bench/simulate_speed.py --out bench/results/simulate-speed.json

Traces are drawn (`bench/drawn.py`) before the clock runs, with 8 or 2 of 128 experts a token; 32
have slots. A layer call costs about the same for few experts as for many, so that calls of two are
the slowest to count. Time is what the processor spends in `replay`, in one thread, so that other
processes do not count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import machine
from drawn import SEED, drawn
from hotexperts.simulate import Trace, replay

POLICIES = ("lru", "ewma", "auto", "adv")
CALLS = ((8, 1), (8, 8), (2, 1))  # experts a token, batch
CAPACITY = 32
REPEAT = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="result file, written after each policy")
    args = parser.parse_args()
    traces = {top_k: drawn(top_k) for top_k, _ in CALLS}
    found: dict[str, Any] = {}
    for policy in POLICIES:
        found[policy] = {
            f"{top_k} of 128, batch {batch}": measure(traces[top_k], policy, batch)
            for top_k, batch in CALLS
        }
        print(policy, found[policy], flush=True)
        if args.out:
            about = {"seed": SEED, "capacity": CAPACITY, "repeat": REPEAT}
            machine.write(args.out, "simulate-speed", {**about, "policies": found})


def measure(trace: Trace, policy: str, batch: int) -> dict[str, Any]:
    """Demanded experts of one replay, and how many of them a minute."""
    speeds = []
    for _ in range(REPEAT):
        start = time.process_time()
        demands = replay(trace, policy, CAPACITY, batch).total.demands
        speeds.append(round(60 * demands / (time.process_time() - start)))
    return {"demands": demands, "demands_a_minute": machine.spread(speeds)}


if __name__ == "__main__":
    main()
