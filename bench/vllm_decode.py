"""Decode and prefill in stock vLLM, Qwen3-30B-A3B shape: cached, resident, and vLLM's own offloads.

    python bench/vllm_decode.py --traces DIR --out bench/results/vllm-decode.json

24 of the model's 48 layers (29 GB of experts), random weights, FULL CUDA graphs, routing replayed
(R1: docs/traces.md) in every column. Each of these is a process of its own: "stock" has every
expert on the GPU and no plug-in; "cache" one engine whose slots change, with every expert resident
too (0 slots); "uva" is `--cpu-offload-gb 60 --cpu-offload-params experts`; "prefetch" vLLM's
prefetch offloader on experts; "eager" what vLLM PR 37190 proposes (a host-managed LRU without CUDA
graphs), beside the device-managed cache and residents without graphs.

A step is the wall time of a steady run over its number of steps. Serial floor = resident step +
missed bytes / (0.94 x link); percent of bound = max(resident step, missed bytes / link) / step.
Prefill: 2000 tokens that use every expert, to the first token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cases
import machine
import missed_bytes
import vllm_engine
from hotexperts.bench.bound import bound
from vllm_engine import Engine

CASES = ("cache", "stock", "uva", "eager", "prefetch")
SHAPE = vllm_engine.QWEN3_30B
ENGINE = {"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 8 << 30}
GRAPHS = {"cudagraph_capture_sizes": [1, 8, 32], "cudagraph_mode": "FULL_DECODE_ONLY"}
OFFLOADS: dict[str, dict[str, Any]] = {
    "uva": {"cpu_offload_gb": 60, "cpu_offload_params": {"experts"}},
    "prefetch": {
        "offload_group_size": 1,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
        "offload_params": {"experts"},
    },
}
BATCHES_BY_SLOTS: dict[int, tuple[int, ...]] = {
    0: (1, 8, 32),
    128: (1, 8, 32),
    96: (8, 32),
    64: (1, 8, 32),
    32: (1, 8),
    16: (1,),
}
PREFILL_SLOTS = (0, 128, 32)
STEPS = {1: (60, 200), 8: (40, 80), 32: (20, 40)}  # warm, then timed
FEW_STEPS = {1: (4, 30), 8: (4, 12), 32: (2, 8)}
PREFILL_TOKENS = 2000
REPEAT = 3


def main() -> None:
    about = {"shape": SHAPE, "replay": "R1", "graphs": GRAPHS}
    benchmark = cases.Benchmark("vllm-decode", CASES, measure, about, compare, show)
    cases.run(benchmark, cases.parser(__doc__).parse_args())


def show(row: cases.Row) -> str:
    lines = []
    for name, found in row["runs"].items():
        more = " ".join(f"{key} {value:.4g}" for key, value in found.items() if key in SHOWN)
        lines.append(f"\n  {name:28} {found['ms']:8.2f} ms {more}")
    return f"load {row['load_seconds']:.0f} s, link {row['link_gb_s']:.1f} GB/s" + "".join(lines)


SHOWN = ("hit_rate", "missed_gb", "percent_of_serial_floor", "percent_of_bound", "of_link")


def compare(table: cases.Table) -> dict[str, Any]:
    """Adds the floors, against the engine's own run without a cache."""
    for row in table.values():
        for name, found in row["runs"].items():
            _compare(found, row["runs"].get(_resident_of(name)), row["link_gb_s"])
    return {}


def _resident_of(name: str) -> str:
    how, _, what = name.rpartition(", ")
    return f"{'eager ' if how.startswith('eager') else ''}resident, {what}"


def _compare(found: dict[str, Any], resident: dict[str, Any] | None, link: float) -> None:
    if resident is None or "missed_gb" not in found:
        return
    base, copy_ms = resident["ms"], 1e3 * found["missed_gb"] / link
    found["of_resident"] = found["ms"] / base
    found |= bound(found["ms"], base, 1e9 * found["missed_gb"], link)._asdict()
    found["percent_of_serial_floor"] = 100 * found["serial_floor_ms"] / found["ms"]
    found["of_link"] = copy_ms / found["ms"]


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), SHAPE, **options(case))
    loaded = time.perf_counter() - start
    ids = routing(args.traces, SHAPE["num_hidden_layers"])
    replay = vllm_engine.Replay(engine, ids)
    row: dict[str, Any] = {"load_seconds": loaded, "link_gb_s": machine.link_gb_s(), "runs": {}}
    if case == "cache":
        row["caches"] = engine.caches.describe()
        for slots, batches in BATCHES_BY_SLOTS.items():
            engine.use_slots(slots)
            label = f"{slots} slots" if slots else "resident"
            row["runs"] |= timed(engine, replay, label, batches, slots in PREFILL_SLOTS, STEPS)
    elif case == "eager":
        row["runs"] = timed_eager(engine, replay)
    else:
        engine.clear_graphs()
        engine.capture_graphs()
        steps = STEPS if case == "stock" else FEW_STEPS
        row["runs"] = timed(engine, replay, case, (1, 8, 32), True, steps)
    row["peak_gpu_gb"] = engine.peak_gpu_gb()
    return row


def options(case: str) -> dict[str, Any]:
    """Of `LLM`."""
    found = {**ENGINE, "compilation_config": GRAPHS, **OFFLOADS.get(case, {})}
    if case == "cache":
        found["moe_expert_cache_size"] = 32
    if case == "eager":
        found |= {"moe_expert_cache_size": 32, "enforce_eager": True}
        found["moe_expert_cache_policy"] = "lru"
        # A host that manages the cache would unpack rows itself: the proposal copies them plain.
        found["moe_expert_cache_options"] = {"packing": "none"}
        del found["compilation_config"]
    return found


def routing(traces: Path, num_layers: int) -> Any:
    """R1 as int `[steps, layers, rows, K]`."""
    import numpy as np
    import torch

    ids = missed_bytes.read(traces / missed_bytes.TRACE)
    steps = np.arange(missed_bytes.NUM_POSITIONS)
    found = []
    for layer in range(num_layers):
        positions = (steps + 97 * (layer // 8)) % missed_bytes.NUM_POSITIONS
        found.append(ids[:32, positions, layer % ids.shape[2]])  # [rows, steps, K]
    return torch.from_numpy(np.stack(found)).permute(2, 0, 1, 3).contiguous()


def timed(
    engine: Engine,
    replay: vllm_engine.Replay,
    label: str,
    batches: tuple[int, ...],
    has_prefill: bool,
    steps: dict[int, tuple[int, int]],
    prompt_tokens: int = 64,
) -> dict[str, Any]:
    """Decode at each batch, and prefill."""
    found: dict[str, Any] = {}
    for batch in batches:
        replay.step = 0
        num_warm, num_timed = steps[batch]
        taken = engine.timed_decode(batch, num_warm, num_timed, prompt_tokens)
        row = {"ms": statistics.fmean(taken), "step_ms": machine.spread(taken)}
        found[f"{label}, batch {batch}"] = row | per_step(engine.counts, num_timed)
        print(f"{label}, batch {batch}: {row['ms']:.2f} ms", file=sys.stderr, flush=True)
    if has_prefill:
        found[f"{label}, prefill"] = timed_prefill(engine, replay)
    return found


def timed_prefill(engine: Engine, replay: vllm_engine.Replay) -> dict[str, Any]:
    taken = []
    for repeat in range(1 + REPEAT):
        replay.show_random(repeat)
        if repeat == 1:
            engine.reset_stats()
        taken.append(engine.timed_prefill(PREFILL_TOKENS))
    counts = engine.sums() if engine.has_slots else {}
    row = {"ms": statistics.median(taken[1:]), "step_ms": machine.spread(taken[1:])}
    return row | per_step(counts, REPEAT)


def per_step(counts: dict[str, int], num_steps: int) -> dict[str, Any]:
    if not counts:
        return {}
    demanded = counts["hits"] + counts["misses"]
    return {
        "hit_rate": counts["hits"] / demanded if demanded else 1.0,
        "missed_gb": counts["bytes_moved"] / num_steps / 1e9,
        "bypassed": counts["bypasses"] / num_steps,
    }


def timed_eager(engine: Engine, replay: vllm_engine.Replay) -> dict[str, Any]:
    """Without graphs: residents, the device-managed cache, and the host-managed one."""
    from hotexperts.cache import CachedWeightProvider

    found: dict[str, Any] = {}
    steps = {1: (40, 80)}
    prompt = 4  # the host-managed cache has no waves for kernels that want a map
    for slots, label in ((0, "eager resident"), (32, "eager device, 32 slots")):
        engine.use_slots(slots)
        found |= timed(engine, replay, label, (1,), False, steps, prompt)
    caches, device = engine.caches, engine.runner.device
    for name, layer in caches.layers.items():
        store = caches.stores[name]
        layer.use(
            CachedWeightProvider(
                store,
                32,
                policy="lru",
                device=device,
                banks=caches.shared.banks[store.layout],
                turn=caches.shared.turn,
            )
        )
    return found | timed(engine, replay, "eager host, 32 slots", (1,), False, steps, prompt)


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
