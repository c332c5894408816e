"""Two GPUs on one model, Qwen3-30B-A3B shape: their links, decode steps, and who waits for whom.

    python bench/two_gpu.py --traces DIR --out bench/results/two-gpu.json

24 of the model's 48 layers, random weights, FULL CUDA graphs, routing replayed (R1:
docs/traces.md). Each of these is a process of its own: "link" copies with one GPU and with both at
once; "one" is one GPU; "tp" two of them with a part of every expert each; "ep" two with half of the
experts each, and slots for those, so that the same share of the experts is on the GPUs. A step is
the wall time of a steady run over its number of steps. The stalls of a row come from a run of its
own, whose graphs stamp the clock around every all-reduce (bench/stamps.py).

With --seconds, what does not fit is left out, and the result says so; "one" has a quarter of the
time, "tp" half of what is left.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import vllm_decode
import vllm_engine
import vllm_ranks
from two_gpu_rows import compare, show

CASES = ("link", "one", "tp", "ep")
TWO = {"tensor_parallel_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": TWO,
    "ep": TWO | {"enable_expert_parallel": True},
}
SHAPE = vllm_engine.QWEN3_30B
SMALL_SHAPE = {**SHAPE, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
SMALL_SHAPE |= {"num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4, "vocab_size": 512}
# Of the experts in slots, and whether stalls are recorded; the most important first.
ROUNDS = (
    (0.25, False),
    (0.5, True),
    (1.0, True),
    (1.0, False),
    (0.5, False),
    (0.25, True),
    (0.125, False),
    (0.125, True),
)
PARTS_OF_TIME = {"one": 0.25, "tp": 0.5}  # of what is left when a case starts
BATCHES = {0.25: (1, 8, 32), 0.5: (1, 8, 32), 1.0: (1, 8, 32), 0.125: (1,)}
STEPS = {1: (40, 100), 8: (16, 30), 32: (8, 16)}  # warm, then timed
RECORDED_STEPS = {1: (40, 40), 8: (16, 20), 32: (8, 12)}
SMALL_STEPS = {1: (3, 6), 8: (2, 4), 32: (2, 4)}
UNTIL = "HOTEXPERTS_BENCH_UNTIL"  # seconds since the epoch, for the children


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--seconds", type=float, help="stop measuring after as many")
    parser.add_argument(
        "--fill-host-gb", type=float, default=0.0, help="touch so much memory first:"
    )
    parser.add_argument(
        "--small", action="store_true", help="a tiny shape without graphs, for CPUs"
    )
    args = parser.parse_args()
    os.environ |= vllm_ranks.ENVIRONMENT
    if not args.measure:
        os.environ[UNTIL] = str(time.time() + args.seconds if args.seconds else "inf")
        _fill(args.fill_host_gb)
    about = {"shape": SMALL_SHAPE if args.small else SHAPE, "replay": "R1"}
    about |= {"graphs": None if args.small else vllm_decode.GRAPHS}
    benchmark = cases.Benchmark("two-gpu", CASES, measure, about, compare, show)
    cases.run(benchmark, args)


def _fill(gb: float) -> None:
    """A virtual machine's memory may come as it is touched, which is no part of any start."""
    if gb:
        how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mmap.mmap(-1, int(gb * 1e9), flags=how).close()


def measure(case: str, args: argparse.Namespace) -> cases.Row:
    if case == "link":
        import links

        return links.measure(2)
    if _is_over():
        sys.exit(f"{case}: no time left")
    left = float(os.environ.get(UNTIL, "inf")) - time.time()
    os.environ[UNTIL] = str(time.time() + PARTS_OF_TIME.get(case, 1.0) * left)
    shape = SMALL_SHAPE if args.small else SHAPE
    ids = vllm_decode.routing(args.traces, shape["num_hidden_layers"]).numpy().astype("uint8")
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(Path(folder), shape, ids, options(case, args.small))
    row: cases.Row = {"start_seconds": ranks.start_seconds, "ranks": ranks.facts, "runs": {}}
    num_local = shape["num_experts"] // (2 if case == "ep" else 1)
    try:
        for name, found in _runs(ranks, num_local, args.small, has_stalls=case != "one"):
            row["runs"].setdefault(name, {}).update(found)
            _keep(row, case, args.out)
    except Exception:  # what was measured before it stays
        row["stopped_by"] = traceback.format_exc()
        traceback.print_exc()
    ranks.close()
    if args.out is not None:
        _part(case, args.out).unlink(missing_ok=True)
    wanted = [f"{share:.1%} of slots, batch {b}" for share in BATCHES for b in BATCHES[share]]
    row["left_out"] = [name for name in wanted if name not in row["runs"]]
    return row


def _keep(row: cases.Row, case: str, out: Path | None) -> None:
    """What is known so far, should this process be ended before it can say it."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        _part(case, out).write_text(json.dumps(row, indent=1))


def _part(case: str, out: Path) -> Path:
    return out.with_suffix(f".{case}.part")


def _start(folder: Path, shape: dict[str, Any], ids: Any, found: dict[str, Any]) -> Any:
    """The engine; without vLLM's own all-reduce where the host does not let ranks share memory."""
    try:
        return vllm_ranks.Ranks(folder, shape, ids, **found)
    except Exception:
        if "tensor_parallel_size" not in found:
            raise
        traceback.print_exc()
        return vllm_ranks.Ranks(folder, shape, ids, **found, disable_custom_all_reduce=True)


def options(case: str, is_small: bool) -> dict[str, Any]:
    """Of `LLM`."""
    found: dict[str, Any] = {**vllm_decode.ENGINE, **WAYS[case], "moe_expert_cache_size": 16}
    found["moe_expert_cache_options"] = {"check_host_memory": False}  # it may grow on demand
    if is_small:
        return found | {
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 256,
            "kv_cache_memory_bytes": 1 << 28,
        }
    return found | {"compilation_config": vllm_decode.GRAPHS}


def _runs(
    ranks: Any, num_local: int, is_small: bool, *, has_stalls: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row's name and what was found: a speed, or the stalls of the same row."""
    for share, is_stamped in ROUNDS:
        if is_stamped and not has_stalls:
            continue
        usual, measure_one = (RECORDED_STEPS, _stalls) if is_stamped else (STEPS, _speed)
        if _is_over():
            return
        num_slots = round(share * num_local)
        ranks.use(num_slots, is_stamped=is_stamped)
        for batch in BATCHES[share]:
            if _is_over():
                return
            steps = (SMALL_STEPS if is_small else usual)[batch]
            name, found = f"{share:.1%} of slots, batch {batch}", measure_one(ranks, batch, steps)
            print(f"{name}: {found}", file=sys.stderr, flush=True)
            yield name, {"slots": num_slots, **found}


def _is_over() -> bool:
    return time.time() > float(os.environ.get(UNTIL, "inf"))


def _speed(ranks: Any, batch: int, steps: tuple[int, int]) -> dict[str, Any]:
    taken, found = ranks.decode(batch, *steps, is_recorded=False)
    missed = [rank["counts"]["bytes_moved"] / steps[1] / 1e9 for rank in found]
    is_alike = all(rank["counts"] == found[0]["counts"] for rank in found)
    more = {"missed_gb_by_rank": missed, "ranks_counted_alike": is_alike}
    return taken | {"hit_rate": vllm_ranks.hit_rate(found)} | more


def _stalls(ranks: Any, batch: int, steps: tuple[int, int]) -> dict[str, Any]:
    import numpy as np

    from stamps import spreads

    taken, found = ranks.decode(batch, *steps, is_recorded=True)
    times, moved = (np.stack([rank[name] for rank in found]) for name in ("times", "moved"))
    clocks = [rank["clock_step_ns"] for rank in found]
    stalls = {"clock_step_ns": max(clocks), **spreads(times, moved)}
    return {"stamped_ms": taken["ms"], "stalls": stalls}


if __name__ == "__main__":
    main()
