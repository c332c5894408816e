"""Hit rates of every policy on recorded and drawn routing, with Belady's bound; needs no GPU.

    python bench/policies.py --traces DIR --out bench/results/policies.json --plots docs/policies

The drawn trace (`hotexperts trace --synthetic fitted`, seed 7) is always there; recorded ones are
taken from DIR as far as they are in it: docs/traces.md has the forms. Of moe507m the last 24
sequences are replayed: parameters were looked at on the others. Replay: warm, prompts token by
token and not counted, ties by id, one event a layer and step; a batch is so many lanes. The rate of
`fractional` is of bytes. With --policies these alone are replayed, into the results that are there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import machine
from drawn import SEED, drawn
from hotexperts.cli.curves import draw_curves
from hotexperts.policy import POLICIES
from hotexperts.simulate.files import read_trace
from hotexperts.simulate.fractional import FRACTIONAL
from hotexperts.simulate.sweep import Sweep, count_steps, run_sweep
from hotexperts.simulate.trace import Trace

NUM_TUNED_ON = 24  # sequences of moe507m
BOUNDS = ("belady", "belady-atomic")
LEFT_OUT = ("random", "static")  # the first knows nothing, the second must be told
SHOWN = ("adv", "auto", "lfu", "w-tinylfu")  # curves of all would be a thicket


class Case(NamedTuple):
    """What to replay of one trace."""

    name: str
    file: str | None
    capacities: tuple[int, ...]
    batches: tuple[int, ...]


CASES = (
    Case("Qwen3-30B-A3B", "bigmoeonedge_qwen.npz", (16, 32, 64), (1,)),
    Case("gpt-oss-120b", "bigmoeonedge_gptoss.npz", (16, 32, 64), (1,)),
    Case("granite-3.0-1b-a400m", "onnxgenai_granite3_1b_a400m.npz", (4, 8, 16), (1,)),
    Case("moe507m", "moe507m_dev.npz", (8, 16, 32), (1, 8)),
    Case("fitted", "SYNTHETIC_q3like_48x300.npz", (32, 64), (8,)),
    Case("drawn", None, (16, 32, 64), (1, 8)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, help="folder")
    parser.add_argument("--out", type=Path, help="result file, written after each trace")
    parser.add_argument("--plots", type=Path, help="folder for one SVG a trace")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--policies", metavar="NAMES", help="these alone, divided by commas")
    args = parser.parse_args()
    if args.policies and (args.plots or not args.out):
        parser.error("--policies adds to the file of --out, and draws nothing")
    policies = [*(name for name in POLICIES.names() if name not in LEFT_OUT), FRACTIONAL, *BOUNDS]
    table: dict[str, dict[str, dict[str, float]]] = {}
    if args.policies:
        policies = args.policies.split(",")
        table = json.loads(args.out.read_text())["hit_rates"]
    for case, trace in found(args.traces):
        sweep = Sweep({case.name: trace}, policies, case.capacities, case.batches, "warm")
        count_steps(sweep)
        counts = run_sweep(sweep, args.jobs)
        rows = table.setdefault(case.name, {})
        for cell, stats in counts.items():
            column = f"batch {cell.batch}, {cell.capacity} of {trace.num_experts}"
            rows.setdefault(column, {})[cell.policy] = stats.hit_rate
        print(case.name, flush=True)
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            shown = replace(sweep, policies=SHOWN)
            draw_curves(shown, counts, args.plots / f"{case.name}.svg")
        if args.out:
            machine.write(args.out, "policies", {"seed": SEED, "hit_rates": table})


def found(folder: Path | None) -> Iterator[tuple[Case, Trace]]:
    """The cases whose traces are there."""
    for case in CASES:
        if case.file is None:
            yield case, drawn()
        elif folder is not None and (folder / case.file).exists():
            trace = read_trace(folder / case.file)
            yield case, held_out(trace) if case.name == "moe507m" else trace


def held_out(trace: Trace) -> Trace:
    """Without the sequences that parameters were looked at on."""
    kept = np.isin(trace.seq, np.unique(trace.seq)[NUM_TUNED_ON:])
    return Trace(trace.ids[kept], trace.phase[kept], trace.seq[kept], trace.meta)


if __name__ == "__main__":
    main()
