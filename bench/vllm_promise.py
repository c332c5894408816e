"""Qwen3-30B-A3B whole (58 GB of experts) in stock vLLM under a ceiling of GPU memory.

    python bench/vllm_promise.py --traces DIR --out bench/results/vllm-promise.json

48 layers, random weights, loaded once with `--moe-expert-cache-gib` at the lowest ceiling; then the
slots grow to what each higher one has room for. Ceilings are enforced: PyTorch may not allocate
more, and what the GPU says is in use (context and graphs included) is reported. Routing is replayed
(R1: docs/traces.md); prefills use every expert. Forecasts for slower links: missed bytes over the
link.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import cases
import machine
import vllm_decode
import vllm_engine
from vllm_engine import Engine

CASES = ("whole",)
CEILINGS_GIB = (8, 12, 16, 24)
SHAPE = {**vllm_engine.QWEN3_30B, "num_hidden_layers": 48}
KV_NBYTES = 1 << 28
STEPS = {1: (40, 120), 8: (10, 25)}
CHUNK_TOKENS = 1024  # of a prompt; 2048 leave no room for a token's experts in 8 GiB
LINKS_GB_S = (12, 26)  # PCIe 3.0 x16 and 4.0 x16, as they are reached


def main() -> None:
    about = {"shape": SHAPE, "kv_bytes": KV_NBYTES, "chunk_tokens": CHUNK_TOKENS}
    benchmark = cases.Benchmark("vllm-promise", CASES, measure, about, compare, show)
    cases.run(benchmark, cases.parser(__doc__).parse_args())


def show(row: cases.Row) -> str:
    ceilings = [f"\n  {name}: {found}" for name, found in row["ceilings"].items()]
    return vllm_decode.show(row) + "".join(ceilings)


def compare(table: cases.Table) -> dict[str, Any]:
    for row in table.values():
        for name, found in row["runs"].items():
            found["of_link"] = found["missed_gb"] / row["link_gb_s"] / found["ms"] * 1e3
            if "batch" in name:
                batch = int(name.rsplit(" ", 1)[-1])
                found["tokens_per_s"] = 1e3 * batch / found["ms"]
                found["forecast_tokens_per_s"] = {
                    f"{link} GB/s": batch * link / found["missed_gb"] for link in LINKS_GB_S
                }
    return {}


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    used_before = _used()
    start = time.perf_counter()
    _enforce(CEILINGS_GIB[0])
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), SHAPE, **_options(CEILINGS_GIB[0]))
    row: dict[str, Any] = {
        "load_seconds": time.perf_counter() - start,
        "load_peak_gpu_gb": engine.peak_gpu_gb(),
        "host_bytes": _host_nbytes(),
        "link_gb_s": machine.link_gb_s(),
        "ceilings": {},
        "runs": {},
    }
    replay = vllm_engine.Replay(engine, vllm_decode.routing(args.traces, 48))
    for gib in CEILINGS_GIB:
        slots = _slots(engine, _enforce(gib))
        engine.use_slots(slots)
        label = f"{gib} GiB"
        row["runs"] |= vllm_decode.timed(engine, replay, label, (1, 8), True, STEPS)
        row["ceilings"][label] = {"slots": slots, "gpu_bytes_used": _used() - used_before}
    return row


def _options(gib: int) -> dict[str, Any]:
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    return {
        "moe_expert_cache_gib": gib,
        "gpu_memory_utilization": gib * 2**30 / total,
        "kv_cache_memory_bytes": KV_NBYTES,
        "max_model_len": 2304,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "max_num_seqs": 8,
        "compilation_config": {
            "cudagraph_capture_sizes": [1, 8],
            "cudagraph_mode": "FULL_DECODE_ONLY",
        },
    }


def _slots(engine: Engine, total_nbytes: int) -> int:
    """As many a layer as the plug-in gives where this is `--moe-expert-cache-gib`."""
    from hotexperts.integrations.vllm import budget, stores
    from hotexperts.sizing import capacity_for_budget

    ours, model = engine.caches, engine.runner.get_model()
    experts = next(m for m in model.modules() if type(m).__name__.endswith("RoutedExperts"))
    other = (
        sum(parameter.nbytes for parameter in model.parameters())
        + budget.kv_nbytes(engine.config)
        + budget.workspace_nbytes(engine.config, experts)
        + budget.CONTEXT_NBYTES
    )
    shapes = [stores.shape_of(store, ours.top_k) for store in ours.stores.values()]
    return capacity_for_budget(total_nbytes, other, shapes).capacity


def _enforce(gib: int) -> int:
    """PyTorch may not allocate more; in bytes."""
    import torch

    nbytes = gib << 30
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total)
    return nbytes


def _used() -> int:
    """What the GPU's processes have taken; ours alone, if it is the only one that changes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def _host_nbytes() -> dict[str, int]:
    """Resident now, and at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(found[name].split()[0]) for name in ("VmRSS", "VmHWM")}


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
