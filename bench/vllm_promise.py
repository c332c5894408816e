"""Qwen3-30B-A3B whole (58 GB of experts) in stock vLLM under a ceiling of GPU memory.

    python bench/vllm_promise.py --traces DIR --out bench/results/vllm-promise.json

48 layers, random weights, `--moe-expert-cache-gib` at the ceiling. The ceiling is enforced: PyTorch
may not allocate more, and what the GPU says is in use (context and graphs included) is reported.
The model's own router routes prefills; in decode, routing is replayed (R1: docs/traces.md).
Forecasts for slower links: max(time of the resident step, missed bytes over the link).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import cases
import vllm_decode
import vllm_engine
from vllm_engine import Engine

CASES = ("8GiB", "12GiB", "16GiB", "24GiB")
SHAPE = {**vllm_engine.QWEN3_30B, "num_hidden_layers": 48}
KV_NBYTES = 1 << 29
STEPS = {1: (40, 120), 8: (10, 25)}
LINKS_GB_S = (12, 26)  # PCIe 3.0 x16 and 4.0 x16, as they are reached


def main() -> None:
    about = {"shape": SHAPE, "kv_bytes": KV_NBYTES}
    benchmark = cases.Benchmark("vllm-promise", CASES, measure, about, compare, vllm_decode.show)
    cases.run(benchmark, cases.parser(__doc__).parse_args())


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
    import torch

    from device_decode import link

    ceiling = int(case.removesuffix("GiB")) << 30
    total = torch.cuda.get_device_properties(0).total_memory
    used_before = _used()
    torch.cuda.set_per_process_memory_fraction(ceiling / total)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            Path(folder),
            SHAPE,
            moe_expert_cache_gib=ceiling / 2**30,
            gpu_memory_utilization=ceiling / total,
            kv_cache_memory_bytes=KV_NBYTES,
            max_model_len=2304,
            max_num_seqs=8,
            compilation_config={
                "cudagraph_capture_sizes": [1, 8],
                "cudagraph_mode": "FULL_DECODE_ONLY",
            },
        )
    loaded = time.perf_counter() - start
    row: dict[str, Any] = {
        "load_seconds": loaded,
        "caches": engine.caches.describe(),
        "host_bytes": _host_nbytes(),
        "first_token_ms": [engine.timed_prefill(2000) for _ in range(3)],
    }
    ids = vllm_decode.routing(args.traces, SHAPE["num_hidden_layers"])
    replay = vllm_engine.Replay(engine, ids)
    engine.clear_graphs()
    engine.capture_graphs()
    row["runs"] = vllm_decode.timed(engine, replay, case, (1, 8), True, STEPS)
    row["gpu_bytes_used"] = _used() - used_before
    row["peak_gpu_gb"] = engine.peak_gpu_gb()
    row["link_gb_s"] = link()
    return row


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
