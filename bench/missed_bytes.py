"""Missed bytes of each policy in the Qwen3-30B-A3B shape, relative to LRU; needs no GPU.

    python bench/missed_bytes.py --traces DIR --out bench/results/missed-bytes.json

Replay R1 (docs/traces.md): 24 layers, 128 experts, top 8; model layer l reads trace layer l mod 8;
batch row r reads sequence r mod 48 at position (step + 97 (l div 8)) mod 300. Decisions are made as
the provider has them made: one event a layer call, and at most a bank's rows turned away where so
many experts may be demanded. Kernels decide the same, bit for bit (tests/kernels).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import machine
from hotexperts.policy import POLICIES
from hotexperts.sizing import MIN_DEMAND_TO_BYPASS, bank_rows

TRACE = "SYNTHETIC_q3like_48x300.npz"
NUM_LAYERS, NUM_EXPERTS, NUM_SEQUENCES, NUM_POSITIONS = 24, 128, 48, 300
EXPERT_NBYTES = 9_437_184
CASES = ((1, 16), (1, 32), (1, 64), (8, 64), (32, 96))  # batch, slots a layer
BASELINE = "lru"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--policies", nargs="*", default=["auto", "adv"])
    args = parser.parse_args()
    ids = read(args.traces / TRACE)
    table: dict[str, Any] = {}
    for batch, capacity in CASES:
        missed = {name: misses(ids, name, batch, capacity) for name in (BASELINE, *args.policies)}
        table[f"batch {batch}, {capacity} slots"] = {
            name: {
                "missed_bytes_per_step": count * EXPERT_NBYTES / NUM_POSITIONS,
                "of_lru": count / missed[BASELINE],
            }
            for name, count in missed.items()
        }
        print(batch, capacity, {n: round(c / missed[BASELINE], 3) for n, c in missed.items()})
    if args.out:
        machine.write(args.out, "missed-bytes", {"replay": "R1", "cases": table})


def read(path: Path) -> np.ndarray:
    """Ids `[sequence, position, layer, k]`."""
    found = np.load(path)
    order = np.argsort(found["seq"], kind="stable")
    ids = found["ids"][order].astype(np.int64)
    return ids.reshape(NUM_SEQUENCES, NUM_POSITIONS, *ids.shape[1:])


def misses(ids: np.ndarray, name: str, batch: int, capacity: int) -> int:
    """Missed experts over all layers and 300 steps, from an empty cache."""
    rows = np.arange(batch) % NUM_SEQUENCES
    num_trace_layers, top_k = ids.shape[2:]
    most_demanded = min(batch * top_k, NUM_EXPERTS)
    limit = bank_rows(NUM_EXPERTS, capacity) if most_demanded >= MIN_DEMAND_TO_BYPASS else 0
    total = 0
    for layer in range(NUM_LAYERS):
        policy = POLICIES.load(name)(NUM_EXPERTS, capacity)
        resident: set[int] = set()
        for step in range(NUM_POSITIONS):
            position = (step + 97 * (layer // 8)) % NUM_POSITIONS
            demand, counts = np.unique(
                ids[rows, position, layer % num_trace_layers], return_counts=True
            )
            decision = policy.decide(
                demand.tolist(),
                counts.tolist(),
                resident,
                capacity - len(resident),
                max_bypassed=limit,
            )
            total += len(decision.admitted) + len(decision.bypassed)
            resident -= set(decision.victims)
            resident |= set(decision.admitted)
    return total


if __name__ == "__main__":
    main()
